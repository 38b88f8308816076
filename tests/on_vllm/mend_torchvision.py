"""torchvision's wheel does not import with a CPU build of torch that lacks two of its operators. vLLM imports it in
every one of its processes, so this patches the environment: `python tests/on_vllm/mend_torchvision.py` in it.

Does nothing if torchvision imports already.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = '''"""Defines what torchvision looks for, just before its first import."""

import sys

KEPT = []  # operators live as long as their library


class Definitions:
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        KEPT.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            KEPT[0].define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, Definitions())
'''


def imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


if __name__ == "__main__" and not imports():
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "torchvision_operators.py").write_text(MODULE)
    (packages / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    if not imports():
        sys.exit("torchvision does not import, and not for lack of its operators")
