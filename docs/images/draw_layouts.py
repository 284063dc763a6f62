"""Draws layouts.png: what each of eight devices holds of one matrix, training and generating.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python docs/images/draw_layouts.py

The rectangles are read from the real shardings, so that the picture says what the program does.
"""

import pathlib

import jax
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from rlhf_jax.sharding.mesh import regroup, training_view
from rlhf_jax.sharding.rules import parameter_shardings
from rlhf_jax.sharding.traffic import moved

TRAIN, GENERATE = {"data": 1, "fsdp": 2, "tensor": 4}, {"data": 4, "fsdp": 1, "tensor": 2}
SHAPE = (8, 8)  # embed, mlp
KEPT, RECEIVED, OUTLINE = "#3b6ea5", "#e3a857", "#444444"


def regions(sharding):
    """device -> (row, column, rows, columns) of its shard."""
    cuts = sharding.devices_indices_map(SHAPE)
    spans = {
        d: [(c.start or 0, n if c.stop is None else c.stop) for c, n in zip(cut, SHAPE, strict=True)]
        for d, cut in cuts.items()
    }
    return {d: (r[0], c[0], r[1] - r[0], c[1] - c[0]) for d, (r, c) in spans.items()}


def draw(axes, region, colour, fill):
    row, column, rows, columns = region
    axes.add_patch(
        Rectangle(
            (column, row), columns, rows, facecolor=colour if fill else "none", edgecolor=colour, lw=1.5
        )
    )


def main():
    train = training_view(TRAIN)
    generate = regroup(train, GENERATE)
    shape = jax.ShapeDtypeStruct(SHAPE, "float32")
    source, target = (parameter_shardings(view, ("embed", "mlp"), shape) for view in (train, generate))
    have, want = regions(source), regions(target)
    figure, grid = plt.subplots(2, 4, figsize=(8.4, 4.9))
    for axes, device in zip(grid.flat, jax.devices(), strict=True):
        draw(axes, want[device], RECEIVED, True)
        draw(axes, have[device], KEPT, True)
        draw(axes, (0, 0, *SHAPE), OUTLINE, False)
        axes.set(xlim=(-0.2, 8.2), ylim=(8.2, -0.2), xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"device {device.id}", fontsize=10)
        for side in axes.spines.values():
            side.set_visible(False)
    share = max(moved(source, target, SHAPE).values()) / (SHAPE[0] * SHAPE[1])
    grid[1, 0].set_xlabel("mlp →", fontsize=9)
    grid[1, 0].set_ylabel("← embed", fontsize=9)
    figure.suptitle(
        "One matrix [embed, mlp]: trained with fsdp 2 x tensor 4, generating with data 4 x tensor 2\n"
        f"blue: held from training    amber: received for generating, {share:g} of the matrix per device",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(pathlib.Path(__file__).with_name("layouts.png"), dpi=110)


if __name__ == "__main__":
    main()
