"""`python -m megatron.clip_grads_patch` is `megatron-clip-grads`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
