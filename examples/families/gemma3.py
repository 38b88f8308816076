"""Your own model family: Gemma 3, whose attention is not just causal. Name it in a YAML:

worker:
  actor:
    model: {model_path: google/gemma-3-4b-it, family: examples/families/gemma3.py:Gemma3}
"""

from mtrl.models.families import ModelFamily, ProcessorEncoder, ProcessorImageEncoder


class Gemma3(ModelFamily):
    encoder = ProcessorEncoder  # tokens and pixels by the checkpoint's own Processor
    image_encoder = ProcessorImageEncoder
    vision_tower = "model.vision_tower"
    projector = "model.multi_modal_projector"
    sliding_windows = True  # most layers see the last tokens only, as its config says
    image_blocks = True  # the tokens of an image see one another
    shares_prefix = True
