"""Packs the command; the revised clip_grads.py travels as its data.

The wheel must not own a path below megatron/core: pip would overwrite megatron-core's file when it
installs ours and delete it when it uninstalls ours.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CLIP_GRADS = "megatron/core/optimizer/clip_grads.py"
PACKAGE = "megatron/clip_grads_patch"
VERSION = re.search(r'__version__ = "(.+)"', Path(PACKAGE, "__init__.py").read_text())[1]


class BuildWithClipGrads(build_py):
    """Puts the file in beside the command. A checkout that is linked to has it already."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            shutil.copyfile(CLIP_GRADS, Path(self.build_lib, PACKAGE, "clip_grads.py"))

    def get_source_files(self):
        return super().get_source_files() + [CLIP_GRADS]


setup(
    name="megatron-clip-grads",
    version=VERSION,
    description="Megatron-Core gradient norm and clipping for lists of mixed dtypes",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["megatron.clip_grads_patch"],
    cmdclass={"build_py": BuildWithClipGrads},
    install_requires=["torch>=2.5", "megatron-core"],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "test": ["pytest", "hypothesis", "setuptools>=70.1", "triton; sys_platform == 'linux'"],
    },
    entry_points={
        "console_scripts": ["megatron-clip-grads = megatron.clip_grads_patch.command:main"]
    },
)
