"""The Ray actor that trains runs: it starts the worker process on its node, and forwards messages and signals."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from dapo.ablation.process import WorkerProcess
from dapo.ablation.task import News, Outcome, Task
from dapo.errors import ClusterError


class PlacedWorker:
    """Answers `train` and `news` in one thread and `send_signal` in another, so Ray must give it two threads.

    If the actor dies, the kernel kills the process, and with it the run.
    """

    def open(self, witness: str, folder: str, variables: Mapping[str, str]) -> str:
        """Start the process in this folder with these variables. Return the name of the node.

        `witness` is a file that the driver has just created in the runs' folder, to check that this node sees it.
        """
        node = socket.gethostname()
        if not os.path.exists(witness):
            raise ClusterError(
                f"{node} does not see {os.path.dirname(witness)}, which every node must share with the driver (--out)"
            )
        with suppress(OSError):  # no such folder on this node: stay in the job's copy of the working directory
            os.chdir(folder)
        self.process = WorkerProcess(os.environ | dict(variables))
        self.process.start()
        return node

    def train(self, task: Task) -> list[News]:
        """Start to train a run, and wait for the first messages."""
        self.process.begin(task)
        return self.news()

    def news(self) -> list[News]:
        """Wait for messages about the run. If it failed, the next run gets a new process."""
        news = [self.process.news()]
        while not isinstance(news[-1], Outcome) and self.process.connection.poll():
            news.append(self.process.news())
        if isinstance(news[-1], Outcome) and news[-1].failure is not None:
            self.process.close()
        return news

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)
