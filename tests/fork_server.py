"""`rlhf-jax` as processes that are started in no time: forked from one that has imported everything.

Run as a program it reads a line with a log file, a limit and arguments as JSON, forks, and answers with the
child's process id, and with its exit status once that has ended. Nothing asks for a device before the fork.
"""

import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys


class ForkServer:
    """with ForkServer(environment) as server: child = server.start(arguments, log)"""

    def __init__(self, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(__file__).parents[1],
        )

    def start(self, arguments, log, *, longest=resource.RLIM_INFINITY):
        """The process id of `rlhf-jax ARGUMENTS`, whose output is added to the file `log`.

        Args:
          longest: bytes of the longest file that it may write, after which its disk is full.
        """
        print(json.dumps([str(log), longest, arguments]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def wait(self):
        """The exit code of the child that was started last; minus the number of the signal that ended it."""
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def serve():
    import transformers.models.auto.tokenization_auto

    from rlhf_jax import cli
    from rlhf_jax.trainers import pipeline  # noqa: F401

    transformers.PreTrainedTokenizerFast  # noqa: B018, an import
    for line in sys.stdin:
        log, longest, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (longest, resource.RLIM_INFINITY))
            cli.main(arguments)
            raise AssertionError("main ends the process")
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
