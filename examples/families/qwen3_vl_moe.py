"""Your own model family: Qwen3-VL with experts and prompts that number their images. Name it in a YAML:

worker:
  actor:
    model: {model_path: my_checkpoint, family: examples/families/qwen3_vl_moe.py:NumberedEncoder}
"""

from mtrl.models.families import QwenVLEncoder
from mtrl.models.families.text import content_parts


class NumberedEncoder(QwenVLEncoder):
    """Writes "Picture 1: " before the first image, and so on, so that questions can refer to images by number."""

    def render(self, messages):
        number, numbered = 0, []
        for message in messages:
            content = []
            for part in content_parts(message):
                if part["type"] == "image":
                    number += 1
                    content.append({"type": "text", "text": f"Picture {number}: "})
                content.append(part)
            numbered.append({**message, "content": content})
        return super().render(numbered)
