"""gs:// on this disk: epath, and what is built on it, makes the calls that it would make to a bucket."""

import os
import pathlib
import sys
import types

from etils.epath import backend, gpath
from orbax.checkpoint._src.path import atomicity_defaults, gcs_utils
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath

SCHEME = "gs://"


def mount(monkeypatch, root: pathlib.Path):
    """From here on gs://NAME is the folder `root`/NAME, for whatever goes through epath and nothing else."""

    def on_disk(path):
        text = os.fspath(path)
        return f"{root}/{text.removeprefix(SCHEME)}" if text.startswith(SCHEME) else text

    class Bucket:
        def __getattr__(self, name):
            method = getattr(backend.os_backend, name)
            return lambda *paths, **options: method(*map(on_disk, paths), **options)

        def rename(self, *_):
            raise NotImplementedError("an object store renames nothing")

        replace = rename

    def committed(plain):
        return lambda path, **options: (
            CommitFileTemporaryPath if str(path).startswith(SCHEME) else plain(path, **options)
        )

    bucket = Bucket()
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", bucket)
    monkeypatch.setattr(gpath, "_GCS_BACKENDS", gpath._GCS_BACKENDS | {bucket})
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    # Orbax asks Google's client for the kind of bucket, and nothing else.
    for name in ("google", "google.cloud", "google.cloud.storage"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    for name in ("get_default_temporary_path_class", "get_item_default_temporary_path_class"):
        monkeypatch.setattr(atomicity_defaults, name, committed(getattr(atomicity_defaults, name)))
    # Orbax gives its paths to a C++ library by this name.
    monkeypatch.setattr(gpath.PosixGPath, "as_posix", on_disk)
