"""Two real processes: each reads its own shards, all export and save together, as one process would."""

import pytest

from rlhf_jax.models import export_model, load_model, load_tokenizer
from tests import two_processes

from . import checkpoints

CODE = """
import pathlib, jax, numpy as np
from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.models import export_model, load_model, load_tokenizer
from rlhf_jax.models.huggingface import open_model
from rlhf_jax.models.parameters import logical_axes, shapes
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.placement import placed_shapes
from rlhf_jax.sharding.processes import fetch
from rlhf_jax.sharding.rules import parameter_shardings

folder = pathlib.Path({folder!r})
def layout(**sizes):
    view = training_view(dict(data=1, fsdp=1, tensor=1) | sizes)
    return lambda model: parameter_shardings(view, logical_axes(model), shapes(model))

model, variables = load_model(folder / "in", shardings=layout(fsdp=8))
assert not variables["params"]["embed"]["embedding"].is_fully_addressable
export_model(folder / "two", model, variables, tokenizer=load_tokenizer(folder / "in"))

half_written = folder / "checkpoints" / "ppo" / "4"
if jax.process_index() == 0:
    half_written.mkdir(parents=True)
saved = Checkpoints(folder, "ppo", keep=1)
for step in (3, 4):
    saved.save(step, variables, dict(best=step))
saved.close()
again = Checkpoints(folder, "ppo", keep=1)
assert again.latest_step() == 4 and again.steps() == [4]
like = placed_shapes(shapes(model), layout(data=2, tensor=4)(model))
restored, host = again.restore(4, dict(params=like))
assert host == dict(best=4)
jax.tree.map(np.testing.assert_array_equal, fetch(restored), fetch(variables))
again.close()
print("done")
"""


@pytest.mark.slow
def test_two_processes_read_save_restore_and_export_as_one(tmp_path):
    pytest.importorskip("torch")
    source = checkpoints.save(checkpoints.hf_model("llama", vocab_size=304), tmp_path / "in")
    checkpoints.tokenizer(pad="<pad>").save_pretrained(str(source))
    for code, out, err in two_processes.run_code(CODE.format(folder=str(tmp_path))):
        assert code == 0, err[-3000:]
        assert out.endswith("done\n")
    model, variables = load_model(source)
    export_model(tmp_path / "one", model, variables, tokenizer=load_tokenizer(source))
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two
