"""Wrong input: exit code 2, one line that names the value and the remedy, and nothing left behind."""

import os
import re
import signal

import pytest

from rlhf_jax import cli
from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics
from rlhf_jax.run_directory import open_run
from tests.bad_input import make_world
from tests.trainers.conftest import TINY


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def run(world, tmp_path, monkeypatch, capsys):
    """A command on tiny settings in the folder of files; gives (exit code, lines on stderr)."""
    monkeypatch.setenv("RLHF_JAX_CACHE", "off")
    monkeypatch.chdir(world)

    def run(command, *settings, config="empty.yaml"):
        given = [config, *TINY, f"run.dir={tmp_path / 'new' / 'run'}", *settings]
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as caught:
                cli.main([command, *given])
        finally:
            signal.signal(signal.SIGTERM, handler)
        return caught.value.code, capsys.readouterr().err.splitlines()

    return run


@pytest.fixture
def refused(run, tmp_path):
    """The line with which a command is refused; nothing may be left."""

    def refused(command, *settings, **options):
        code, lines = run(command, *settings, **options)
        assert (code, len(lines)) == (2, 1), lines
        assert lines[0].startswith("error: ")
        assert list(tmp_path.iterdir()) == []
        return lines[0]

    return refused


PAIRS = "data.train=pairs.jsonl"
LLAMA = ("policy.model=llama", PAIRS)

DATA = {
    "missing file": ("data.train=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
    "missing validation file": ("data.validation=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
    "missing prompts": ("data.prompts=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
    "empty file": ("data.train=empty.jsonl", "at least one row, found an empty source"),
    "truncated gzip": ("data.train=cut.jsonl.gz", r"cut\.jsonl\.gz:\d+: .* truncated gzip"),
    "no gzip": ("data.train=plain.jsonl.gz", r"plain\.jsonl\.gz:1: expected gzip data"),
    "invalid JSON": ("data.train=no_json.jsonl", r"no_json\.jsonl:4: .* invalid JSON \(.* at \d+\)"),
    "invalid UTF-8": ("data.train=no_utf8.jsonl", r"no_utf8\.jsonl:5: expected UTF-8, found byte 0xff"),
    "missing key": ("data.train=no_key.jsonl", r'no_key\.jsonl:3: expected the keys "chosen" and "rejected"'),
    "no usable pair": (
        "data.train=no_pair.jsonl",
        "no usable pair is left; dropped 1 different prompts, 1 empty response, 1 equal sides",
    ),
    "broken parquet": ("data.train=broken.parquet", r"broken\.parquet:row 1: expected parquet"),
    "another kind of file": ("data.train=table.csv", r"table\.csv: expected a file that ends in"),
    "directory": ("data.train=llama", "found a directory; name a file in it"),
    "neither file nor hub name": ("data.train=nobody/nothing", "no such file, and the hub gave no data set"),
    "limit of 0": ("data.limit=0", r"data\.limit=0 must be at least 1"),
    "nothing to hold out": (
        "data.limit=1",
        r"data\.validation_fraction=0\.2 holds out 0 of 1 distinct prompts",
    ),
    "all prompts held out": ("data.validation=pairs.jsonl", "all .* prompts for PPO occur in the held-out"),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case, refused):
    setting, words = DATA[case]
    assert re.search(words, refused("run", PAIRS, setting))


MODELS = {
    "unknown architecture": ("policy.model=mamba", r"MambaForCausalLM is not supported; use one of: .*llama"),
    "unknown architecture of the reward model": ("reward.model=mamba", "MambaForCausalLM is not supported"),
    "unknown architecture of the critic": ("critic.init=mamba", "MambaForCausalLM is not supported"),
    "missing weights": ("policy.model=no_weights", r"no_weights has no model\.safetensors"),
    "missing weights of the reward model": (
        "reward.model=no_weights",
        r"no_weights has no model\.safetensors",
    ),
    "truncated weights": ("policy.model=cut_weights", "is not a whole safetensors file .*; fetch it again"),
    "wrong shape": (
        "policy.model=other_shape",
        r"'model\.embed_tokens\.weight' has shape \(300, 16\), expected \(300, 32\)",
    ),
    "missing tensors": ("policy.model=more_layers", r"more_layers has no tensor 'model\.layers\.1\."),
    "missing tokenizer": ("policy.model=no_tokenizer", "no tokenizer that can be read"),
    "missing config.json": ("policy.model=no_config", r"config\.json does not exist"),
    "missing directory": ("policy.model=./nowhere", r"'\./nowhere' is not a directory"),
    "neither directory nor hub name": ("policy.model=nobody/nothing", "neither a directory nor a model"),
    "tokenizer without EOS": ("policy.model=no_eos", "names an end-of-sequence token; set eos_token"),
    "reward tokenizer without EOS": ("reward.model=no_eos", "names an end-of-sequence token; set eos_token"),
    "encoder as policy": ("policy.model=encoder", "sees the future: it has no 'lm' head"),
    "encoder as critic": ("critic.init=encoder", "sees the future: it has no 'value' head"),
    "critic from an encoder": (
        ("reward.model=encoder", "critic.init=reward"),
        r"is an encoder, which sees the future; use critic\.init=policy",
    ),
    "critic with another tokenizer": (("policy.model=new", "critic.init=llama"), "has another tokenizer"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, refused):
    given, words = MODELS[case]
    assert re.search(words, refused("run", *LLAMA, *([given] if isinstance(given, str) else given)))


@pytest.mark.parametrize("setting", ["policy.model", "reward.model"])
def test_ids_beyond_the_embedding(setting, refused):
    """Token ids that have no row took some other row, silently."""
    words = r"ids up to 299 and the model vocab_size=250 embeddings; resize the model to 300"
    assert re.search(words, refused("run", *LLAMA, f"{setting}=few_rows"))


SETTINGS = {
    "unknown key": ("ppo.epoch=2", r"ppo\.epoch .* did you mean ppo\.epochs\?"),
    "mistyped value": ("ppo.epochs=two", r"ppo\.epochs=two on the command line: expected integer"),
    "negative size": ("ppo.batch_size=-1", r"ppo\.batch_size=-1 must be at least 1"),
    "size of zero": ("rollout.response_length=0", r"rollout\.response_length=0 must be at least 1"),
    "negative layers": ("policy.shape.layers=-2", r"policy\.shape\.layers=-2 must be at least 1"),
    "minibatches that do not divide": ("ppo.minibatches=3", r"not divisible by .*; use ppo\.batch_size=9"),
    "micro-batch that does not divide": ("sft.micro_batch_size=3", r"use sft\.micro_batch_size=2"),
    "batch over devices": (
        ("ppo.batch_size=12", "ppo.minibatches=1", "placement.train={}"),
        r"ppo\.batch_size=12 is not divisible by data \* fsdp = 8 of placement\.generate; use 16",
    ),
    "mesh larger than the devices": ("placement.train.tensor=16", r"needs 32 devices \(.*\) and there are 8"),
    "mesh that does not divide": ("placement.train.tensor=3", "does not divide 8 devices"),
    "mesh that leaves devices out": ("placement.train.data=1", "placement.train covers 4 of 8 devices"),
    "greedy PPO": ("rollout.temperature=0", r"rollout\.temperature=0 is greedy"),
    "k1 in the loss": ("ppo.kl_placement=loss", r"gradient of k1 has mean 0 .*; use ppo\.kl_kind=k2 or k3"),
    "null character": ('run.dir="a\\0b"', "null character"),
    "unknown kind of place": (
        "run.dir=https://a/b",
        r"run\.dir=https://a/b is neither a local path nor gs://",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case, refused):
    given, words = SETTINGS[case]
    assert re.search(words, refused("run", *([given] if isinstance(given, str) else given)))


ROLLOUT = r"rollout\.prompt_length \+ rollout\.response_length"
SIZES = {
    "prompt length below the template": (
        "run", "rollout.prompt_length=5", r"rollout\.prompt_length=5 is too small: .* take 8 tokens",
    ),
    "response beyond the shape": (
        "run", ("policy.model=new", "rollout.response_length=200"), ROLLOUT + " = 240 exceeds .*=128",
    ),
    "rollout beyond rotary positions": ("run", "policy.model=short_llama", ROLLOUT + " = 48 exceeds its 32"),
    "rollout beyond learned positions": (
        "run", ("policy.model=gpt2", "rollout.response_length=100"), ROLLOUT + " = 140 exceeds its 128",
    ),
    "rollout beyond the critic": ("run", "critic.init=short_llama", r"critic\.init=short_llama: .* its 32"),
    "rollout beyond the reward model": (
        "ppo", "reward.model=reward_model", r"\+ 1 for its end-of-sequence token = 49 exceeds its 48",
    ),
    "reward length beyond an encoder": (
        "run", ("reward.model=encoder", "reward.max_length=500"), "max_length = 500 exceeds its 128",
    ),
    "reward length beyond the policy": (
        "reward", ("reward.model=policy", "reward.max_length=500"), "max_length = 500 exceeds its 128",
    ),
    "sft length beyond the policy": (
        "sft", ("policy.model=short_llama", "sft.epochs=1"), r"sft\.max_length = 120 exceeds its 32",
    ),
    "ppo batch beyond the prompts": ("run", "ppo.batch_size=512", "=512 is larger than the"),
    "reward batch beyond the pairs": ("reward", "reward.batch_size=512", "fewer than reward.batch_size=512"),
    "sft batch beyond the pairs": (
        "sft", ("sft.batch_size=512", "sft.epochs=1"), "fewer than sft.batch_size=512",
    ),
    "no pair fits": ("reward", "reward.max_length=5", r"0 of \d+ training pairs fit reward\.max_length=5"),
    "no dialogue fits": ("sft", ("sft.max_length=5", "sft.epochs=1"), r"0 of \d+ .* sft\.max_length=5"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_models_and_data(case, refused):
    """Found before any training, not after an hour of it."""
    command, given, words = SIZES[case]
    assert re.search(words, refused(command, *LLAMA, *([given] if isinstance(given, str) else given)))


COMMANDS = {
    "untrained reward model": ("ppo", "reward.model=new", "reward.model=new is not trained; run"),
    "reward model that is the policy": ("ppo", "reward.model=policy", "reward.model=policy is not trained"),
    "reward model without a head": ("ppo", "reward.model=llama", "no trained score head; train one"),
    "reward model whose head is lost": ("ppo", "reward.model=no_head", "no tensor 'score.weight'"),
    "missing reward model": ("ppo", "reward.model=./nowhere", "is not a directory"),
    "ppo before sft": ("ppo", "sft.epochs=1", "sft_policy does not exist; run `rlhf-jax sft` first"),
    "sft of no epoch": ("sft", "sft.epochs=0", "sft.epochs=0 leaves nothing to do"),
    "evaluation before ppo": ("eval", "run.seed=0", "best_policy does not exist; run `rlhf-jax ppo`"),
    "export before ppo": ("export", "run.seed=0", "holds no checkpoint; run `rlhf-jax ppo` first"),
    "report before a run": ("report", "run.seed=0", "has no config.yaml; give the directory of a run"),
    "reward model beside a function": ("reward", "reward.function=a:b", "reward.function is set"),
    "function without a name": ("ppo", "reward.function=score", "not of the form module:function"),
    "function of no module": ("ppo", "reward.function=nowhere:f", "cannot be imported .*No module named"),
    "function that is not there": ("ppo", "reward.function=functions_of_bad_input:f", "has no attribute 'f'"),
    "function that is a number": ("ppo", "reward.function=functions_of_bad_input:number", "not a function"),
    "module that does not parse": (
        "ppo", "reward.function=broken_of_bad_input:f", r"SyntaxError \(invalid syntax \(broken_.*, line 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(case, refused):
    command, setting, words = COMMANDS[case]
    assert re.search(words, refused(command, *LLAMA, setting))


@pytest.mark.parametrize(
    ("config", "words"),
    [("nowhere.yaml", r"nowhere\.yaml does not exist"), ("llama", "llama is a directory")],
)
def test_configuration_files(config, words, refused):
    assert re.search(words, refused("run", config=config))


def test_an_empty_configuration_is_the_defaults(run, world):
    assert load_config("empty.yaml", []) == load_config(None, [])
    assert run("config") == (0, [])


@pytest.mark.parametrize("place", ["/proc", "/proc/new/run", "pairs.jsonl/run", "llama"])
def test_run_directories_that_cannot_be(place, refused, world):
    """Not writable, not to be made, below a file, and one that holds something else of ours."""
    if place == "llama":
        (world / "foreign").mkdir(exist_ok=True)
        (world / "foreign" / "eval.json").write_text("{}")
        place = "foreign"
    before = sorted(os.listdir(world))
    assert re.search(r"run\.dir=.*; choose another", refused("run", *LLAMA, f"run.dir={place}"))
    assert sorted(os.listdir(world)) == before


def snapshot(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_of_another_configuration_stays_as_it_is(run, world, tmp_path):
    directory = tmp_path / "new" / "run"
    with open_run(load_config("empty.yaml", [*TINY, f"run.dir={directory}"])):
        pass
    before = snapshot(directory)
    for settings, words in (
        (
            ["ppo.gamma=0.5"],
            r"holds a run of another configuration: ppo\.gamma: 1\.0 -> 0\.5; choose another",
        ),
        (["run.resume=never"], r"holds a run and run\.resume=never; choose another directory"),
        (["ppo.iterations=9", "ppo.micro_batch_size=3"], r"use ppo\.micro_batch_size=2"),
    ):
        code, lines = run("run", *settings)
        assert (code, len(lines)) == (2, 1)
        assert re.search(words, lines[0])
        assert snapshot(directory) == before


def test_a_run_directory_in_use_stays_as_it_is(run, tmp_path):
    directory = tmp_path / "new" / "run"
    with open_run(load_config(None, [*TINY, f"run.dir={directory}"])):
        before = snapshot(directory)
        code, lines = run("run")
        assert (code, len(lines)) == (2, 1)
        assert re.search(r"is in use by process \d+ .*; wait for it or choose another", lines[0])
        assert snapshot(directory) == before


@pytest.mark.parametrize("existing", [(), ("job.out",)], ids=["new directory", "directory of a job script"])
def test_a_directory_in_which_nothing_was_recorded_is_taken_back(existing, tmp_path):
    """Its configuration would have refused the mended one."""
    directory = tmp_path / "new" / "run"
    for name in existing:
        directory.mkdir(parents=True)
        (directory / name).write_text("started")
    for settings in ([], ["ppo.gamma=0.5"]):
        with (
            pytest.raises(InputError, match="too late"),
            open_run(load_config(None, [f"run.dir={directory}", *settings])),
        ):
            raise InputError("found too late")
    assert directory.exists() == bool(existing)
    if existing:
        assert {path.name for path in directory.iterdir()} <= {*existing, ".lock"}


def test_a_directory_with_records_is_kept(tmp_path):
    settings = load_config(None, [f"run.dir={tmp_path}"])

    def fail_after_a_record():
        with open_run(settings) as opened:
            (opened.path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft"}\n')
            raise InputError("late")

    with pytest.raises(InputError, match="late"):
        fail_after_a_record()
    assert (tmp_path / "config.yaml").exists()


def test_fewer_held_out_prompts_than_asked_for_are_a_note(world, monkeypatch, caplog):
    from rlhf_jax.trainers.inputs import read_pairs, split_prompts

    data = load_config(None, [f"data.train={world / 'pairs.jsonl'}"]).data
    with caplog.at_level("INFO", "rlhf_jax"):
        prompts = split_prompts(data, read_pairs(data, 0), 0, held_out=100)
    assert f"eval.prompts=100 and there are {len(prompts.held_out)} held-out prompts" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("hi", ["rollout.prompt_length=3"], "rollout.prompt_length=3 is too small"),
        ("hi", ["rollout.response_length=500"], "+ rollout.response_length = 510 exceeds its 128"),
        ("", [], "a prompt needs words of the user"),
    ],
)  # fmt: skip
def test_generate(prompt, settings, words, world, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_JAX_CACHE", "off")
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", str(world / "llama"), prompt, *settings])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.slow
def test_a_function_that_raises_is_named_with_its_line(refused):
    """Whatever a function may not return is in tests/rollout/test_reward_model.py."""
    words = r"functions_of_bad_input:raises raised ZeroDivisionError \(division by zero\) in .*, line 3"
    assert re.search(words, refused("ppo", *LLAMA, "reward.function=functions_of_bad_input:raises"))


@pytest.mark.slow
def test_truncated_sampling_is_said_once_and_counted(run, tmp_path):
    function = "reward.function=functions_of_bad_input:score"
    code, lines = run("ppo", *LLAMA, function, "rollout.top_k=5", "ppo.iterations=2")
    warnings = [line for line in lines if line.startswith("warning: rollout.top_k=5")]
    assert (code, len(warnings)) == (0, 1)
    assert "biased" in warnings[0]
    records = read_metrics(tmp_path / "new" / "run")
    assert [record["rollout/truncated_sampling"] for record in records] == [1.0, 1.0]
