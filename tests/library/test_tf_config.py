"""TF_CONFIG is read as TensorFlow reads it; what it would not understand is refused."""

import json
import socket

import pytest

from multigpu import launch, tf_config
from multigpu.errors import UserError
from multigpu.launch.world import World
from multigpu.tf_config import find_world, gpus_of_worker, read

TWO = ["10.0.0.1:1201", "10.0.0.2:1201"]


def test_what_write_writes_read_reads():
    assert read(tf_config.write(TWO, 1)) == (TWO, 1)
    assert json.loads(tf_config.write(TWO, 1)) == json.loads(config(1)["TF_CONFIG"])


def config(index: object = 0, kind: str = "worker", **cluster: object) -> dict[str, str]:
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": cluster or {"worker": TWO}, "task": {"type": kind, "index": index}}
        )
    }


def test_a_world_of_workers():
    world = find_world(config(1) | {"MASTER_PORT": "7001"})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.nodes) == (
        1,
        2,
        0,
        1,
        2,
    )
    assert (world.launcher, world.address, world.port) == ("TF_CONFIG", "10.0.0.1", 7001)
    assert find_world(config(0)).job == find_world(config(1)).job, (
        "all workers of a run meet at the same port"
    )
    assert (
        find_world(config(0)).job
        != find_world(config(0, worker=["10.0.0.1:1202", TWO[1]])).job
    ), "two runs do not"
    one_node = [find_world(config(index, worker=["a:1", "b:1", "a:2"])) for index in range(3)]
    assert [(w.local_rank, w.local_size) for w in one_node] == [(0, 2), (0, 1), (1, 2)]
    assert find_world(config(0, worker=["[::1]:1201"])).address == "::1"


def test_a_chief_is_rank_0():
    cluster = {"worker": TWO, "chief": ["10.0.0.9:1201"]}
    assert [
        find_world(config(0, "chief", **cluster)).rank,
        *(find_world(config(i, **cluster)).rank for i in (0, 1)),
    ] == [0, 1, 2]
    assert find_world(config(1, **cluster)).address == "10.0.0.9"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'cluster'", ("not JSON", "expected something like")),
        ("{}", ("no list cluster → worker",)),
        (config(worker="a:1")["TF_CONFIG"], ("list of texts", "worker")),
        (config(worker=TWO, ps=["a:1"])["TF_CONFIG"], ("'ps'", "leave them out")),
        (config(0, "evaluator")["TF_CONFIG"], ("'evaluator'", "'worker' or 'chief'")),
        (config(2)["TF_CONFIG"], ("worker 2", "2 workers")),
        (config(-1)["TF_CONFIG"], ("worker -1",)),
        (config(0, "chief")["TF_CONFIG"], ("chief 0", "0 chiefs")),
        (config(True)["TF_CONFIG"], ("task → index",)),
        (json.dumps({"cluster": {"worker": TWO}}), ("task → index",)),
        (json.dumps({"cluster": {"worker": TWO}, "task": "worker"}), ("task → index",)),
        (config(worker=["a:1", "a:1"])["TF_CONFIG"], ("gives a:1 to two workers",)),
        (config(worker=["a:1"], chief=["a:1"])["TF_CONFIG"], ("gives a:1 to two workers",)),
        (config(chief=["a:1", "b:1"])["TF_CONFIG"], ("2 chiefs",)),
        (config(worker=["a"])["TF_CONFIG"], ("'a'", "host:port")),
        (config(worker=["a:65536"])["TF_CONFIG"], ("host:port",)),
        (config(worker=["grpc://a:1"])["TF_CONFIG"], ("host:port",)),
    ],
)
def test_what_tensorflow_would_not_understand(text, words):
    with pytest.raises(UserError) as raised:
        read(text)
    message = str(raised.value)
    assert "TF_CONFIG" in message and all(word in message for word in words), message


def test_without_tf_config_the_launcher_says():
    srun = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "MASTER_ADDR": "x",
    }
    srun |= {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    world = find_world(srun | {"SLURM_GPUS_ON_NODE": "4", "TF_CONFIG": ""})
    assert (world.rank, world.size, world.launcher) == (1, 2, "srun"), (
        "a worker takes all four GPUs of its node"
    )
    assert find_world({}) == World()
    assert find_world(srun | config(1)).launcher == "TF_CONFIG", (
        "each task may have been given its own"
    )
    with pytest.raises(
        UserError,
        match=r"TF_CONFIG says worker 0 of 2, srun says rank 1 of 2: unset TF_CONFIG",
    ):
        find_world(srun | config(0))
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert find_world(shell | config(0)).size == 2, (
        "in the shell of a Slurm job, who writes TF_CONFIG starts the workers"
    )


@pytest.mark.parametrize(
    ("place", "seen", "environ", "expected"),
    [
        ((0, 1, 0, 1), 0, {}, []),
        ((0, 1, 0, 1), 2, {}, [0, 1]),
        ((1, 2, 0, 1), 2, {}, [0, 1]),
        ((0, 2, 0, 2), 4, {}, [0, 1]),
        ((1, 2, 1, 2), 4, {}, [2, 3]),
        ((1, 2, 1, 2), 2, {"SLURM_GPUS_ON_NODE": "2"}, [1]),
        (
            (1, 2, 1, 2),
            2,
            {"SLURM_GPUS_ON_NODE": "4"},
            [0, 1],
        ),  # --gpus-per-task=2: it sees its own
        ((1, 2, 1, 2), 3, {}, "3 GPUs cannot be shared evenly by its 2 workers"),
        ((0, 2, 0, 2), 1, {}, "1 GPU cannot be shared evenly by its 2 workers"),
    ],
)
def test_a_worker_takes_its_part_of_the_nodes_gpus(place, seen, environ, expected):
    world = World(*place, "srun")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            gpus_of_worker(world, seen, environ)
    else:
        assert list(gpus_of_worker(world, seen, environ)) == expected


def test_the_name_under_which_the_others_reach_a_worker(monkeypatch):
    def name(rank: int, address: str, local_size: int = 1) -> str:
        world = World(rank, 2, 0, local_size, "srun", address=address)
        return tf_config._reachable_name(world)

    assert name(1, "10.0.0.1", local_size=2) == "127.0.0.1", "one node: nothing leaves it"
    assert name(0, "head.example") == "head.example"
    assert name(0, "10.0.0.1") == "10.0.0.1"
    assert name(0, "fd00::1") == "[fd00::1]"
    assert name(1, "127.0.1.1") == "127.0.1.1", "rank 0 is on this machine"
    with monkeypatch.context() as other_machine:  # its own address, not rank 0's
        other_machine.setattr(tf_config.socket.socket, "connect", lambda *_: None)
        other_machine.setattr(
            tf_config.socket.socket, "getsockname", lambda *_: ("10.0.0.7", 1)
        )
        assert name(1, "10.0.0.1") == "10.0.0.7"
    with pytest.raises(
        UserError, match=r"worker 1 on .* cannot reach no\.such\.host\.invalid"
    ):
        name(1, "no.such.host.invalid")


def test_the_rendezvous_does_not_take_tensorflows_port():
    text = json.dumps(
        {"cluster": {"worker": ["a:12763", "b:12763"]}, "task": {"type": "worker", "index": 0}}
    )
    with pytest.raises(
        UserError, match="MASTER_PORT is 12763, which TF_CONFIG gives to a worker"
    ):
        find_world({"TF_CONFIG": text, "MASTER_PORT": "12763"})
    assert find_world({"TF_CONFIG": text, "MASTER_PORT": "12764"}).port == 12764


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            UserError, match=rf"{address}, but the port is in use on .*: give another"
        ):
            tf_config._reserve(address)
    with tf_config._reserve("127.0.0.1:0") as one, tf_config._reserve("127.0.0.1:0") as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def connected() -> list[str]:
    return tf_config.connect_workers(find_world(), gpus=0)


def unequal() -> str:
    world = find_world()
    try:
        tf_config.connect_workers(world, gpus=world.rank + 1)
    except UserError as error:
        return str(error)


def test_workers_exchange_their_addresses():
    one, other = launch.call(connected, 2)
    assert (
        one == other
        and len(set(one)) == 2
        and all(address.startswith("127.0.0.1:") for address in one)
    )


def test_workers_with_unequal_numbers_of_gpus():
    assert all(
        "the number of GPUs of rank 1" in message and "rank 0" in message
        for message in launch.call(unequal, 2)
    )


class UnavailableError(Exception):
    """As TensorFlow's is called."""


@pytest.mark.parametrize(
    ("error", "size", "turned"),
    [
        (UnavailableError("The following tasks are unhealthy"), 2, True),
        (
            RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
                "peer"
            ),
            2,
            True,
        ),
        (UnavailableError("alone"), 1, False),
        (RuntimeError("a fault of ours"), 2, False),
        (ValueError("a fault of ours"), 2, False),
    ],
)
def test_a_worker_that_is_gone_is_a_sentence_and_a_fault_of_ours_is_not(error, size, turned):
    with (
        pytest.raises(UserError if turned else type(error)) as raised,
        tf_config.report_lost_worker(World(0, size, 0, size, "TF_CONFIG")),
    ):
        raise error
    assert not turned or "another worker is gone" in str(raised.value)


def test_by_hand_each_worker_reports_the_error():
    for launcher, already_reported in (("TF_CONFIG", False), ("srun", True)):
        world = World(1, 2, 1, 2, launcher)
        with pytest.raises(UserError) as raised, tf_config.report_lost_worker(world):
            raise UserError("reported on rank 0", already_reported=True)
        assert raised.value.already_reported == already_reported
