"""A pool of gloo ranks that run one function of a module after another."""

import datetime
import importlib
import queue
import sys
import traceback

import torch

TIMEOUT_S = 60  # a collective that some rank does not enter ends then, as an error


def _serve(rank, size, store, hook_path, jobs, replies):
    import warnings

    warnings.simplefilter("ignore")
    from megatron.clip_grads_patch.demo import MODULE, UseFile

    sys.meta_path.insert(0, UseFile(hook_path))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    clip_grads = importlib.import_module(MODULE)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    while (job := jobs.get()) is not None:
        module, function, args = job
        try:
            getattr(importlib.import_module(module), function)(clip_grads, rank, *args)
            replies.put((rank, None))
        except BaseException:
            replies.put((rank, traceback.format_exc()))


class Ranks:
    """Starts the processes; calling it runs a function on every rank."""

    def __init__(self, size: int, store: str, hook_path: str):
        context = torch.multiprocessing.get_context("spawn")
        self.jobs, self.replies = [context.Queue() for _ in range(size)], context.Queue()
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, store, hook_path, jobs, self.replies), daemon=True
            )
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function, *args):
        for jobs in self.jobs:
            jobs.put((function.__module__, function.__name__, args))
        problems = []
        for _ in self.jobs:
            try:
                rank, problem = self.replies.get(timeout=3 * TIMEOUT_S)
            except queue.Empty:
                problems.append("a rank did not answer")
                break
            if problem:
                problems.append(f"rank {rank}:\n{problem}")
        assert not problems, "\n".join(problems)

    def close(self):
        """End the processes."""
        for jobs in self.jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()
