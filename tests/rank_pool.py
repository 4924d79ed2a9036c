"""Three gloo ranks that run functions of `rank_checks`, forked once for all tests."""

import os
import traceback

import torch
import torch.distributed as dist
from forked import context

SIZE = 3


def _serve(rank, port, connection):
    import datetime

    import rank_checks

    from trainer.ranks import Ranks

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    while (job := connection.recv()) is not None:
        name, number, num_ranks, arguments = job
        ranks = Ranks(
            rank, num_ranks, store=dist.PrefixStore(f"job-{number}", store),
            group=groups[num_ranks], timeout_s=60,
        )  # fmt: skip
        try:
            answer = getattr(rank_checks, name)(ranks, **arguments)
            connection.send((answer, None))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            connection.send((None, (text, traceback.format_exc())))
    os._exit(0)


class RankPool:
    """Run a function on the first `num_ranks` ranks; a context manager."""

    def __enter__(self):
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        server = context()
        self._connections, self._processes = [], []
        for rank in range(SIZE):
            mine, theirs = server.Pipe()
            process = server.Process(
                target=_serve, args=(rank, self._store.port, theirs), daemon=True
            )
            process.start()
            self._connections.append(mine)
            self._processes.append(process)
        self._number = 0
        return self

    def __exit__(self, *_):
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(5)
            process.kill()

    def errors(self, name, num_ranks, **arguments):
        """Return each rank's answer and error text."""
        self._number += 1
        for connection in self._connections[:num_ranks]:
            connection.send((name, self._number, num_ranks, arguments))
        return [connection.recv() for connection in self._connections[:num_ranks]]

    def __call__(self, name, num_ranks, **arguments):
        """Return each rank's answer; fail with the first traceback."""
        found = self.errors(name, num_ranks, **arguments)
        for _, error in found:
            assert error is None, error[1]
        return [answer for answer, _ in found]
