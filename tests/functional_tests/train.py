"""Trains the demo's GPT; the last line printed is JSON: (loss, norm, reference, clipped, groups).

python tests/functional_tests/train.py FILE STEPS [JSON of more arguments of train_on_gpu]
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.clip_grads_patch.demo import Record, load, train_on_gpu  # noqa: E402

clip_grads, on_gpu = load(original=sys.argv[1])
assert on_gpu, "needs a GPU and Transformer Engine"
record = Record(clip_grads)
train_on_gpu(int(sys.argv[2]), record, **json.loads((sys.argv + ["{}"])[3]))
torch.distributed.destroy_process_group()
print(json.dumps(record.rows))
