"""Reading configurations: precedence, refusals, and the checks across settings."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import pytest

import rlhf_jax
from rlhf_jax.config import (
    check,
    check_devices,
    field_help,
    flat,
    from_dict,
    load_config,
    reference_page,
    to_dict,
    to_yaml,
)
from rlhf_jax.errors import InputError
from rlhf_jax.settings import Config, Layout

PACKAGE = pathlib.Path(rlhf_jax.__file__).parent
DOCS = PACKAGE.parent / "docs"


def refused(*overrides, path=None, devices=None, training=True):
    """The one line that the settings are refused with."""

    def read():
        config = load_config(path, list(overrides))
        check(config, training=training)
        if devices:
            check_devices(config, devices)

    with pytest.raises(InputError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("ppo:\n  gamma: 0.5\n  lam: 0.5\n")
    config = load_config(str(file), ["ppo.lam=0.25"])
    assert (config.ppo.gamma, config.ppo.lam, config.ppo.epochs) == (0.5, 0.25, Config().ppo.epochs)


def test_no_file_and_no_overrides_are_the_defaults_and_pass_the_checks():
    config = load_config(None, [])
    assert config == Config()
    check(config)
    for devices in (1, 8):
        check_devices(config, devices)


def test_the_resolved_yaml_reads_back_equal(tmp_path):
    config = load_config(
        None, ["placement.critic.tensor=2", "ppo.dual_clip=3", "data.limit=7", "ppo.value_clip="]
    )
    file = tmp_path / "b.yaml"
    file.write_text(to_yaml(config))
    assert load_config(str(file), []) == config
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("ppo.learning_rate=1e-5", lambda c: c.ppo.learning_rate == 1e-5),
        ("ppo.value_clip=none", lambda c: c.ppo.value_clip is None),
        ("ppo.value_clip=null", lambda c: c.ppo.value_clip is None),
        ("ppo.gamma=1", lambda c: c.ppo.gamma == 1.0 and isinstance(c.ppo.gamma, float)),
        ("reward.function=a.b:score", lambda c: c.reward.function == "a.b:score"),
        ("placement.critic={tensor: 4}", lambda c: c.placement.critic == Layout(tensor=4)),
        ("placement.critic.tensor=4", lambda c: c.placement.critic == Layout(tensor=4)),
        ("placement.critic=none", lambda c: c.placement.critic is None),
        ("run.tensorboard=true", lambda c: c.run.tensorboard is True),
        ("run.dir=gs://bucket/run", lambda c: c.run.dir == "gs://bucket/run"),
        ("policy.model=123", lambda c: c.policy.model == "123"),
    ],
)
def test_values_are_read_as_their_type(override, read):
    assert read(load_config(None, [override]))


def test_a_plan_file_gives_the_whole_placement(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("placement:\n  train: {fsdp: 2}\n  critic: {tensor: 2}\n")
    config = load_config(None, [f"placement={plan}"])
    assert config.placement.train == Layout(fsdp=2)
    assert config.placement.critic == Layout(tensor=2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ppo.epoch=2", "did you mean ppo.epochs?"),
        ("epochs=2", "did you mean sft.epochs or reward.epochs or ppo.epochs?"),
        ("pppo.lam=1", "did you mean ppo?"),
        ("ppo.qqqqqq=1", "rlhf-jax config --help"),
        ("ppo.epochs=two", "ppo.epochs=two on the command line: expected integer"),
        ("ppo.epochs=2.5", "expected integer"),
        ("ppo.epochs=true", "expected integer"),
        ("ppo.epochs=", "ppo.epochs=none on the command line: expected integer"),
        ("ppo.lam=[1]", "expected number"),
        ("ppo.dual_clip=x", "expected number or none"),
        ("ppo=3", "expected a section"),
        ("run.tensorboard=maybe", "expected true or false"),
        ("policy.model={a: 1}", "expected text"),
        ("data.train=${oc.env:HOME}", "interpolations"),
        ("data.train=${", "interpolations"),
        ("data.train=???", "???"),
        ("run.dir=[x", "not valid YAML"),
        ("ppo.lam=1" + "0" * 400, "expected number"),
        ("data.train=\ud800", "not valid YAML"),
        ("ppo.lam=!!int x", "not valid YAML"),
        ("placement={train: &a {data: 1}, critic: *a}", "aliases (*name) are refused"),
        ("ppo.lam", "expected key=value"),
        ("=3", "expected key=value"),
    ],
)
def test_bad_overrides_are_refused_in_one_line(override, words):
    assert words in refused(override)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"ppo:\n  lam: [\n", "line 3: not valid YAML"),
        (b"ppo:\n  lam: 1\n  lam: 2\n", "line 3"),
        (b"- 1\n", "sections such as `ppo:`"),
        (b"ppo:\n  lam: ${x}\n", "interpolations"),
        (b"ppo:\n  lam: ${\n", "interpolations"),
        (b"ppo: 3\n", "expected a section"),
        (b"ppo:\n", "expected a section"),
        (b"pppo: {}\n", "did you mean ppo?"),
        (b"a: \xff\n", "not UTF-8"),
        (b"\x00\x01", "not valid YAML"),
        (b"{[1, 2]: 3}", "not valid YAML"),
    ],
)
def test_bad_files_are_refused_by_name(content, words, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    message = refused(path=str(file))
    assert "bad.yaml" in message
    assert words in message


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    assert "does not exist" in refused(path=str(tmp_path / "none.yaml"))
    assert "is a directory" in refused(path=str(tmp_path))


def test_an_empty_file_is_the_defaults(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n")
    assert load_config(str(file), []) == Config()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("ppo.batch_size=0", "ppo.batch_size=0 must be at least 1"),
        ("ppo.batch_size=-4", "ppo.batch_size=-4 must be at least 1"),
        (
            "ppo.batch_size=10 ppo.minibatches=4",
            "10 is not divisible by ppo.minibatches=4; use ppo.batch_size=12",
        ),
        (
            "ppo.batch_size=16 ppo.minibatches=2 ppo.micro_batch_size=3",
            "8 is not divisible by ppo.micro_batch_size=3",
        ),
        ("reward.batch_size=16 reward.micro_batch_size=5", "use reward.micro_batch_size=4"),
        ("sft.micro_batch_size=0", "must be at least 1"),
        ("rollout.response_length=0", "must be at least 1"),
        ("rollout.top_p=0", "above 0 and at most 1"),
        ("rollout.top_p=1.5", "above 0 and at most 1"),
        ("rollout.top_k=-1", "0 or more"),
        ("rollout.temperature=-1", "0 or more"),
        ("rollout.temperature=0", "greedy"),
        ("ppo.dual_clip=1", "above 1"),
        ("ppo.clip_low=1", "between 0 and 1"),
        ("ppo.clip_high=0", "above 0"),
        ("ppo.lam=1.1", "between 0 and 1"),
        ("ppo.gamma=-0.1", "between 0 and 1"),
        ("ppo.lam=nan", "not a finite number"),
        ("ppo.learning_rate=inf", "not a finite number"),
        ("ppo.schedule=cosin", "did you mean cosine?"),
        ("ppo.aggregation=token", "one of token_mean, seq_mean_token_sum, seq_mean_token_mean"),
        ("ppo.kl_kind=k4", "one of k1, k2, k3, abs"),
        ("ppo.kl_placement=both", "one of reward, loss"),
        ("ppo.kl_target=6 ppo.kl_coef=0", "start it above 0"),
        ("reward.loss=bt", "bradley_terry"),
        ("policy.dtype=float16", "did you mean bfloat16?"),
        ("run.resume=always", "one of auto, never"),
        ("run.seed=-1", "between 0"),
        ("run.dir=''", "run.dir is empty"),
        ("critic.warmup_iterations=5 ppo.iterations=5", "leaves the actor none"),
        ("critic.shared=true critic.init=reward", "use critic.init=policy or critic.shared=false"),
        ("critic.shared=true placement.critic.tensor=2", "leave placement.critic out"),
        ("critic.coef=-1", "0 or more"),
        ("lora.rank=-1", "0 or more"),
        ("lora.alpha=0", "above 0"),
        ("lora.targets='q,gat'", "gat is none of q, k, v, o, gate, up, down; did you mean gate?"),
        ("lora.targets='q,,v'", "an empty name is none of"),
        ("ppo.warmup_iterations=6 ppo.iterations=5", "exceeds ppo.iterations=5"),
        ("policy.shape.embed=100 policy.shape.heads=3", "use 102"),
        ("policy.shape.heads=4 policy.shape.kv_heads=3", "does not divide policy.shape.heads=4"),
        ("policy.shape.vocab_size=256", "at least 260"),
        ("policy.shape.layers=0", "at least 1"),
        ("policy.shape.max_positions=100", "= 128 exceeds policy.shape.max_positions=100"),
        ("reward.shape.max_positions=100", "reward.max_length=512 exceeds"),
        ("reward.function=score", "module:function"),
        ("placement.train.data=0", "placement.train.data=0 must be at least 1, or -1"),
        ("placement.generate.fsdp=-1", "only one of data and fsdp may be -1"),
        ("placement.critic.devices=0:3", "placement.critic.devices=0:3 is not of the form FIRST-LAST"),
        ("placement.train.devices=3-0", "ends before it begins; use 0-3"),
        ("data.validation_fraction=1", "between 0 and 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_numbers(overrides, words):
    assert words in refused(*overrides.split(" "))


def test_greedy_decoding_is_for_evaluation():
    check(load_config(None, ["rollout.temperature=0"]), training=False)


@pytest.mark.parametrize(
    ("overrides", "devices", "words"),
    [
        ("placement.train.tensor=16", 8, "needs 16 devices (data -1 * fsdp 1 * tensor 16) and there are 8"),
        ("placement.train.tensor=3", 8, "3 (data -1 * fsdp 1 * tensor 3) does not divide 8 devices"),
        ("placement.train.data=2", 8, "placement.train covers 2 of 8 devices"),
        (
            "placement.train.devices=0-3 placement.generate.devices=2-7",
            8,
            "placement.train has devices 0-3 and placement.generate 2-7, which share 2-3",
        ),
        (
            "placement.generate.devices=0-3",
            8,
            "train has devices 0-7 and placement.generate 0-3, which share 0-3",
        ),
        (
            "placement.reward.devices=4-8",
            8,
            "placement.reward.devices=4-8 goes beyond the 8 devices, which are 0-7",
        ),
        (
            "placement.train.devices=0-3 placement.generate.devices=4-7 placement.generate.data=2",
            8,
            "placement.generate covers 2 of 4 devices (4-7)",
        ),
        ("placement.train.devices=0-3 placement.generate.devices=4-7 ppo.batch_size=6", 8, "fsdp = 4 of"),
        (
            "ppo.batch_size=10",
            4,
            "ppo.batch_size=10 is not divisible by data * fsdp = 4 of placement.train; use 12",
        ),
        ("ppo.minibatches=4", 8, "ppo.batch_size / ppo.minibatches=4 is not divisible by data * fsdp = 8"),
        ("ppo.micro_batch_size=4", 8, "ppo.micro_batch_size=4 is not divisible"),
        (
            "reward.batch_size=4",
            8,
            "reward.batch_size=4 is not divisible by data * fsdp = 8 of placement.reward",
        ),
    ],
)
def test_layouts_and_batches_must_fit_the_devices(overrides, devices, words):
    assert words in refused(*overrides.split(" "), devices=devices)


def test_several_processes_share_all_devices():
    """A move to other devices across processes raises deep in the runtime."""
    config = load_config(None, ["placement.train.devices=0-3", "placement.generate.devices=4-7"])
    check_devices(config, 8)
    with pytest.raises(InputError, match=r"placement\.train\.devices=0-3 with 2 processes"):
        check_devices(config, 8, process_count=2)
    check_devices(load_config(None, ["placement.train.devices=0-7"]), 8, process_count=2)


def test_unused_phases_do_not_bind_the_devices():
    check_devices(load_config(None, ["sft.batch_size=3", "sft.epochs=0"]), 8)
    assert "sft.batch_size=3" in refused("sft.batch_size=3", "sft.epochs=1", devices=8)


def test_every_setting_is_explained():
    explained = {entry.name: entry for entry in field_help()}
    for name in flat(Config()):
        assert len(explained[name].help) > 10, name
        assert explained[name].type, name


def test_the_reference_page_is_current():
    current = (DOCS / "configuration.md").read_text()
    assert current == reference_page(), "run: python -m rlhf_jax.config > docs/configuration.md"


def unread_settings():
    """Settings whose attribute no code reads. Checks and reports do not count: they change no run."""
    aside = {"settings.py", "config.py", "checks.py", "report.py", "run_directory.py"}
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in aside:
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    elsewhere = {"run.resume", "run.dir"}  # read by run_directory.py, which is where they act
    layouts = (
        "placement."  # checks.resolve() turns them into sizes by name; the tests of sharding/ see them act
    )
    names = [name for name in flat(Config()) if name not in elsewhere and not name.startswith(layouts)]
    return [name for name in names if name.rpartition(".")[2] not in read]


def test_every_setting_is_read_somewhere():
    assert unread_settings() == []


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(None, []).ppo.lam = 1.0  # type: ignore[misc]


def test_reading_a_configuration_imports_no_jax():
    code = (
        "import sys; from rlhf_jax.config import *; check(load_config(None, ['ppo.lam=1'])); "
        "print(sorted({'jax', 'transformers', 'flax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_choices_are_those_of_the_losses():
    from rlhf_jax.checks import CHOICES
    from rlhf_jax.losses.kl import KL_KINDS
    from rlhf_jax.losses.masked import AGGREGATIONS
    from rlhf_jax.losses.ranking import RANKING_KINDS

    chosen = CHOICES["ppo.kl_kind"], CHOICES["ppo.aggregation"], CHOICES["reward.loss"]
    assert chosen == (KL_KINDS, AGGREGATIONS, RANKING_KINDS)
