"""The first signal is noted, a second one ends the process, and one after the last step is not lost."""

import signal
import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, sys
from rlhf_jax.trainers.interrupt import stop_on_signal, stopped
number = int(sys.argv[1])
"""


def run(code, number):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(int(number))], capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize("asked", [True, False], ids=["in a step", "after the last step"])
def test_the_first_signal_lets_the_step_end(number, code, asked):
    done = run(
        f"""
with stop_on_signal("the/run") as stop:
    assert not stop()
    os.kill(os.getpid(), number)
    print("goes on")
    if {asked}:
        assert stop()
        stopped(stop, "the/run")
print("never")
""",
        number,
    )
    said = "stopped; the state is saved in the/run: the same command goes on from there\n"
    assert (done.returncode, done.stdout) == (code, f"goes on\n{said}"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_does_not_wait_for_anything(number):
    """A handler in Python would run only once the interpreter is back from a program on the devices."""
    done = run(
        """
import threading, time
with stop_on_signal("the/run") as stop:
    os.kill(os.getpid(), number)
    assert stop()
    threading.Thread(target=lambda: time.sleep(50)).start()  # a save that is under way
    print("noted", flush=True)
    os.kill(os.getpid(), number)
    time.sleep(50)
""",
        number,
    )
    assert (done.returncode, done.stdout) == (-number, "noted\n"), done.stderr


def test_handlers_are_as_before_afterwards():
    done = run(
        """
before = signal.getsignal(signal.SIGINT)
with stop_on_signal("the/run"):
    assert signal.getsignal(signal.SIGINT) is not before
assert signal.getsignal(signal.SIGINT) is before
try:
    with stop_on_signal("the/run") as stop:
        os.kill(os.getpid(), number)
        raise ValueError  # tells more than the signal
except ValueError:
    print("said")
""",
        signal.SIGINT,
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr
