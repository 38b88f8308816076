"""A reward that looks at the image itself: does the response name the main colour of the picture?

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/look_at_image.py

`data["images"]` are Pillow images, as the model saw them. Rows without an image return None: "does not apply".
"""

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 220, 50),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}


def reward_function(data):
    if not data["images"]:
        return None
    image = data["images"][0].convert("RGB").resize((32, 32))
    votes = dict.fromkeys(COLOURS, 0)
    for pixel in image.getdata():
        votes[nearest(pixel)] += 1
    main = max(votes, key=votes.get)
    return float(main in data["response"].lower()), {"share_of_main_colour": votes[main] / (32 * 32)}


def nearest(pixel):
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(pixel, COLOURS[name], strict=True)))
