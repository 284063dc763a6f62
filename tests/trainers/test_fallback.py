"""`rlhf-jax config` says which parameters a layout cannot split."""

import json
import subprocess
import sys

from rlhf_jax.config import load_config
from rlhf_jax.models.config_json import config_to_json
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.trainers.fallback import whole_parameters

NINE = ["policy.shape.embed=144", "policy.shape.heads=9", "policy.shape.kv_heads=3"]


def test_heads_that_do_not_divide_are_named_with_their_role():
    """SmolLM2's nine and three heads: the reason why a layout saves less memory than it seems to."""
    settings = [*NINE, "placement.generate.tensor=2", "placement.train.fsdp=2"]
    where, why = "placement.generate: layers/attention", "is not divisible by tensor = 2"
    assert whole_parameters(load_config(None, settings)) == [
        f"{where}/{name}/kernel stays whole: {axis} {why}"
        for name, axis in (("k", "kv_heads 3"), ("o", "heads 9"), ("q", "heads 9"), ("v", "kv_heads 3"))
    ]


def test_what_divides_is_not_named():
    assert (
        whole_parameters(load_config(None, ["placement.train.tensor=4", "placement.generate.fsdp=8"])) == []
    )


def test_a_model_in_a_directory_is_looked_at(tmp_path):
    shape = TransformerConfig(
        vocab_size=30, layers=1, embed=12, heads=2, kv_heads=2, head_dim=6, mlp=18, max_positions=8
    )
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(shape, "score")))
    lines = whole_parameters(
        load_config(
            None, [f"reward.model={tmp_path}", "placement.reward.tensor=4", "policy.model=some/hub-name"]
        )
    )
    assert (
        lines[0] == "placement.reward: embed/embedding stays whole: vocab 30 is not divisible by tensor = 4"
    )
    assert all(line.startswith("placement.reward: ") for line in lines)


def test_the_command_prints_them_as_comments_and_imports_jax_only_then(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    program = (
        "import sys\nfrom rlhf_jax import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit:\n    print('jax' in sys.modules, file=sys.stderr)\n"
    )

    def config(*settings):
        done = subprocess.run(
            [sys.executable, "-c", program, "config", tmp_path / "a.yaml", *settings],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr

    plain, imported = config()
    assert "#" not in plain
    assert imported.strip() == "False"
    shown, imported = config(*NINE, "placement.generate.tensor=2")
    assert "\n# placement.generate: layers/attention/k/kernel stays whole" in shown
    assert imported.strip() == "True"
    (tmp_path / "b.yaml").write_text(shown)
    assert load_config(str(tmp_path / "b.yaml"), []).placement.generate.tensor == 2
