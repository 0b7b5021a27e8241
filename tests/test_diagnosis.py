"""The fault tree: what libraries really say is recognised, each branch by its own words, and told in one line."""

import errno
import os
import re
import subprocess
import sys

import pytest

from weldtrain.diagnosis import FAULTS, diagnosed, explained
from weldtrain.errors import IN_WORKER, ConfigError, DataError, TrainingError
from weldtrain.tasks.explain import explain, fault_tree

# Recorded from these libraries, and a word of the diagnosis that is right for it.
SAID = [
    ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", "killed, for want of memory"),
    ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ", "library crashed"),
    ("RuntimeError: DataLoader worker (pid 22) is killed by signal: Bus error. It is possible that dataloader's workers are "
     "out of shared memory. Please try to raise your shared memory limit.", "could not give"),
    ("RuntimeError: unable to write to file </torch_2314_1602923436_0>: No space left on device (28)", "/dev/shm is full"),
    ("RuntimeError: unable to open shared memory object </torch_31_2>: Too many open files (24)", "open files"),
    ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "process is gone"),
    ("BrokenPipeError: [Errno 32] Broken pipe", "process is gone"),
    ("RuntimeError: received 0 items of ancdata", "open files"),
    ("OSError: [Errno 24] Too many open files: 'images/a.jpg'", "open files"),
    ("RuntimeError: DataLoader timed out after 60 seconds", "in time"),
    ("_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup <lambda> on __main__ failed", "be sent"),
    ("AttributeError: Can't get local object 'f.<locals>.g'", "be sent"),
    ("TypeError: cannot pickle '_thread.lock' object", "be sent"),
    ("RuntimeError: can't start new thread", "may be started"),
    ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "may be started"),
    ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
     "start method", "forked worker"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB",
     "GPU's memory"),
    ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 10.76 GiB total capacity)", "GPU's memory"),
    ("RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later", "a kernel met"),
    ("AssertionError: Torch not compiled with CUDA enabled", "without CUDA"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver is older"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "generation of GPU"),
    ("UserWarning: NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
     "generation of GPU"),
    ("RuntimeError: No CUDA GPUs are available", "no GPU is there"),
    ("RuntimeError: Found no NVIDIA driver on your system.", "no GPU is there"),
    ("RuntimeError: CUDA error: invalid device ordinal", "no GPU is there"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "cuDNN failed"),
    ("RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8, 9, 2) but found runtime version (8, 5, 0)",
     "cuDNN failed"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "midst of a kernel"),
    ("torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970", "in vain"),
    ("[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", "in vain"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:44734",
     "another rank is gone"),
    ("RuntimeError: operator torchvision::nms does not exist", "not built for this torch"),
    ("NotImplementedError: Could not run 'torchvision::nms' with arguments from the 'CUDA' backend.", "not built for this torch"),
    ("RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision versions are incompatible",
     "not built for this torch"),
    ("ValueError: numpy.dtype size changed, may indicate binary incompatibility.", "another NumPy"),
    ("A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0.2 as it may crash.", "another NumPy"),
    ("ImportError: libGL.so.1: cannot open shared object file: No such file or directory", "OpenCV with windows"),
    ("error: OpenCV(4.8.0) window.cpp:1272: error: (-2:Unspecified error) The function is not implemented. Rebuild the library "
     "with Windows, GTK+ 2.x or Cocoa support.", "a window was asked"),
    ("ImportError: libturbojpeg.so.0: cannot open shared object file: No such file or directory", "library of the system"),
    ("OSError: libcudart.so.12: cannot open shared object file: No such file or directory", "library of the system"),
    ("ModuleNotFoundError: No module named 'cv2'", "package is missing"),
    ("RuntimeError: stack expects each tensor to be equal size, but got [3, 800, 1066] at entry 0 and [3, 800, 800] at entry 1",
     "several sizes"),
    ("ValueError: All bounding boxes should have positive height and width. Found invalid box [1, 2, 1, 3]", "boxes are not"),
    ("KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback", "a name that"),
    ("_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` could "
     "result in arbitrary code execution", "more than numbers"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", "damaged"),
    ("RuntimeError: Error(s) in loading state_dict for FasterRCNN:\n\tsize mismatch for roi_heads.box_predictor.cls_score.weight",
     "another model"),
    ("RuntimeError: invalid hash value (expected \"258fb6c6\", got \"e3b0c442\")", "download"),
    ("URLError: <urlopen error [Errno -2] Name or service not known>", "download"),
    ("OSError: [Errno 28] No space left on device: '/out/last.pt'", "disk is full"),
    ("OSError: [Errno 122] Disk quota exceeded", "disk is full"),
    ("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470", "disk is full"),
    ("OSError: [Errno 30] Read-only file system: '/data/out'", "may not be written"),
    ("PermissionError: [Errno 13] Permission denied: '/root/out'", "by this user"),
    ("OSError: [Errno 36] File name too long: 'aaa'", "cannot be"),
    ("EOFError: Ran out of input", "damaged"),
    ("RuntimeError: CUDA error: out of memory", "GPU's memory"),
    ("RuntimeError: CUDA error: the launch timed out and was terminated", "midst of a kernel"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/a.jpg'", "not there"),
    ("OSError: [Errno 116] Stale file handle: '/mnt/nfs/a.jpg'", "network folder"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
     "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)", "machine's memory"),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 4.00 GiB for an array with shape (1,)", "machine's memory"),
    ("ERROR: TensorBoard could not bind to port 6006, it was already in use", "has the port"),
    ("RuntimeError: The server socket has failed to listen on any local network address. EADDRINUSE", "has the port"),
    ("ConfigAttributeError: Key 'lrr' is not in struct", "not known"),
    ("MissingMandatoryValue: Missing mandatory value: dataset.root", "has no value"),
    ("OverrideParseException: mismatched input '=' expecting <EOF>", "cannot be read"),
]


@pytest.mark.parametrize(("text", "words"), SAID)
def test_what_libraries_say_is_recognised(text, words):
    fault = diagnosed(text)
    assert fault is not None and words in fault.means and fault.fix


def test_every_branch_is_reached_by_a_message_of_its_own():
    assert {diagnosed(text) for text, _ in SAID} == set(FAULTS)


def test_what_nobody_said_is_not_explained():
    for text in ("ValueError: x", "RuntimeError: expected scalar type Float but found Half", "KeyError: 'crack'",
                 "AttributeError: Can't get attribute 'Foo' on <module '__main__'>", "ValueError: size mismatch for weights",
                 "NotImplementedError: torchvision::nms is not currently implemented for the MPS device"):
        assert diagnosed(text) is None


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as e:
        return e


def test_an_error_is_told_with_its_place_and_its_exit_code():
    full = explained(OSError(errno.ENOSPC, "No space left on device", "/out/last.pt"))
    assert str(full).startswith("/out/last.pt: a disk is full") and "(No space left on device); make room" in str(full)
    assert full.exit_code == 1 and isinstance(full, TrainingError)
    assert explained(RuntimeError("operator torchvision::nms does not exist")).exit_code == 2
    assert "\n" not in str(explained(RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")))


def test_the_cause_of_an_error_counts_and_our_own_words_stay():
    assert "open files" in str(explained(raised(RuntimeError("the loader failed"), OSError(errno.EMFILE, "Too many open files"))))
    assert explained(DataError("no box", "a.xml")) is None
    assert explained(raised(ValueError("x"), ConfigError("No space left on device"))) is None
    assert explained(ValueError("x")) is None
    with pytest.raises(ValueError) as caught:  # what was only being handled is no cause
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/ECCENTRIC/a.jpg")
        except OSError:
            raise ValueError("crack width is negative")  # noqa: B904
    assert explained(caught.value) is None
    assert "file or folder is not there" in str(explained(caught.value.__context__))
    sent = raised(KeyError("crack"), RuntimeError(f"{IN_WORKER}\n  OSError: [Errno 28] No space left on device"))
    assert explained(sent) is None


def test_the_tree_holds_every_branch(capsys):
    explain(None)
    shown = capsys.readouterr().out
    assert shown.strip() == fault_tree() and all(fault.means in shown and fault.fix in shown for fault in FAULTS)
    explain("... torch.OutOfMemoryError: CUDA out of memory. Tried ...")
    assert "lower loader.batch_size" in capsys.readouterr().out
    with pytest.raises(DataError, match="is not known"):
        explain("Gurke")


def test_every_key_that_a_remedy_names_is_one():
    from weldtrain.config import schema_keys

    named = {key for fault in FAULTS for key in re.findall(r"\b(?:loader|trainer|model|dataset|optimizer)\.\w+", fault.fix)}
    assert named and named <= set(schema_keys())


def test_any_message_can_be_given_on_the_command_line(tmp_path):
    def asked(*args):
        return subprocess.run([sys.executable, "-m", "weldtrain", "task=explain", *args], cwd=tmp_path, capture_output=True,
                              text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})

    done = asked("error=RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. {[=, 'x' \n$(rm -rf ~)")
    assert done.returncode == 0 and "--shm-size" in done.stdout, done.stderr
    assert asked().stdout.count("->") == len(FAULTS)
    unknown = asked("error=x=1,2")
    assert unknown.returncode == 2 and unknown.stderr.count("\n") == 1 and "x=1,2: is not known" in unknown.stderr
    assert not list(tmp_path.iterdir())
