"""What checkpoints made here have of each family besides the layers of Qwen: special tokens and chat format, parts of
the configuration, settings of the images."""

from __future__ import annotations

from typing import Any

from mtrl.models.tiny_families import gemma, gemma4, glm, idefics, internvl, onevision

GEMMA4_FAMILIES = ("gemma4", "gemma4_bidirectional")  # as small ones and as large ones are
OWN_PARTS: dict[str, Any] = {
    **dict.fromkeys(("gemma3", "gemma3_text"), gemma),
    **dict.fromkeys(GEMMA4_FAMILIES, gemma4),
    **dict.fromkeys(("idefics3", "smolvlm"), idefics),
    **dict.fromkeys(("glm4v", "glm4v_moe"), glm),
    "internvl": internvl,
    "llava_onevision": onevision,
}
ONE_SQUARE = (gemma, idefics, internvl)  # the side of the tower's images may be chosen
