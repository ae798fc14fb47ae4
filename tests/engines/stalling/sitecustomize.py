"""Put first on an engine's PYTHONPATH: plants one stall, named by STALL, in its own process.

`deadlock`: after the weights of a model have been loaded its loader makes STALL_FILE and takes a
lock twice. `lock`: a file lock, STALL_FILE, is waited for when torch is imported. `download`: a
file is fetched from STALL_URL, which never sends a byte, before anything is loaded.
"""

import fcntl
import importlib.abc
import os
import sys
import threading
import urllib.request

STALL = os.environ.get("STALL")
LOADERS = {
    "vllm.model_executor.model_loader.base_loader": "BaseModelLoader",
    "sglang.srt.model_loader.loader": "DefaultModelLoader",
}


def _lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    open(os.environ["STALL_FILE"], "w").close()  # a test's clock begins where this stands
    lock.acquire()


def _deadlock_after(loader: type) -> None:
    load = loader.load_model

    def load_model(self, *given, **named):
        load(self, *given, **named)
        after_weights_are_loaded()

    def after_weights_are_loaded() -> None:
        _lock_twice()

    loader.load_model = load_model


def wait_for_the_file_lock() -> None:
    with open(os.environ["STALL_FILE"], "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def snapshot_download() -> None:
    urllib.request.urlopen(os.environ["STALL_URL"]).read()


class Finder(importlib.abc.MetaPathFinder):
    """Acts when a module is first asked for; the module itself is found by the others."""

    def find_spec(self, name, path, target=None):
        if name == "torch" and STALL in ("lock", "download"):
            sys.meta_path.remove(self)
            wait_for_the_file_lock() if STALL == "lock" else snapshot_download()
        elif STALL == "deadlock" and name in LOADERS:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                _deadlock_after(getattr(module, LOADERS[name]))

            spec.loader.exec_module = exec_module
            return spec
        return None


if STALL:
    import importlib.util

    sys.meta_path.insert(0, Finder())
