"""Who belongs to a job of several processes, and what is said when one stays away."""

import re
import socket
import threading
import time

import pytest

from rlhf_jax.cluster import Cluster, find_cluster, first_host, meet
from rlhf_jax.errors import InputError
from tests.two_processes import free_port

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "node[07-09,12]",
    "SLURM_JOB_ID": "123456",
}
TPU = {"TPU_WORKER_HOSTNAMES": "host-a,host-b", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        pytest.param((None, None, None), {}, None, id="a single process"),
        pytest.param(("h:1", 2, 1), {}, Cluster("h:1", 2, 1), id="flags"),
        pytest.param((None, None, None), SLURM, Cluster("node07:23456", 4, 2), id="SLURM"),
        pytest.param((None, None, None), TPU, Cluster("host-a:12321", 2, 1), id="TPU pod on GKE"),
        pytest.param(("h:9", None, None), SLURM, Cluster("h:9", 4, 2), id="a flag goes over SLURM"),
        pytest.param(
            (None, None, None), {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None, id="one task"
        ),
        pytest.param((None, None, None), {"TPU_WORKER_HOSTNAMES": "localhost"}, None, id="one TPU host"),
        pytest.param(("h:1", 1, 0), {}, None, id="one process by flags"),
    ],
)
def test_the_cluster_is_found(given, variables, expected):
    assert find_cluster(*given, variables) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(("h:1", None, None), "--processes and --process", id="a part of the flags"),
        pytest.param(("h", 2, 0), "--coordinator=h is not HOST:PORT", id="no port"),
        pytest.param(("h:1", 2, 2), "--process=2 of --processes=2", id="number too high"),
        pytest.param(("h:1", 0, 0), "--processes=0", id="no process"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        find_cluster(*given, {})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node1", "node1"), ("node1,node2", "node1"), ("n[3-5]", "n3"), ("gpu-a[001,004-7],x", "gpu-a001")],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


def meet_all(numbers, processes, timeout_s):
    """What each of the processes that come, as threads here, is told: None or the message."""
    port, told = free_port(), {}

    def come(i, number):
        try:
            meet(Cluster(f"127.0.0.1:{port}", processes, number), timeout_s)
            told[i] = None
        except InputError as error:
            told[i] = str(error)

    threads = [threading.Thread(target=come, args=pair) for pair in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [told[i] for i in range(len(numbers))]


def test_all_meet_in_any_order():
    assert meet_all([2, 1, 0], 3, 10) == [None] * 3


def test_a_process_that_stays_away_is_named_to_all():
    message = "processes 2, 3 of 4 did not join within 1 s"
    assert meet_all([0, 1], 4, 1) == [message, message]


def test_two_with_one_number_are_told():
    told = meet_all([0, 1, 1], 3, 5)
    assert told[0] == "two processes say that they are process 1 of 3"


def test_without_process_0_the_others_say_where_they_looked():
    start = time.monotonic()
    (told,) = meet_all([1], 2, 1)
    assert re.match(r"process 1 found no process 0 at 127\.0\.0\.1:\d+ within 1 s", told)
    assert time.monotonic() - start < 10


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on port {port}"):
            meet(Cluster(f"127.0.0.1:{port}", 2, 0), 1)
