"""The fault tree: raw failures of libraries, drivers and systems, recognised by type and text; what they mean, what to do.

One table, for whatever breaks in a run and for `task=explain`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weldtrain.errors import IN_WORKER, ConfigError, DataError, TrainingError, WeldtrainError, one_line


class Fault(NamedTuple):
    """`says` is a regular expression for `TypeName: text`, of an error or of one that it came from."""

    area: str
    says: str
    means: str
    fix: str
    kind: type[WeldtrainError] = TrainingError


# The first that fits counts, so the particular comes before the general.
FAULTS = (
    Fault("workers", r"killed by signal: Killed|exitcode[ =]-9|SIGKILL",
          "a worker process was killed, for want of memory most often",
          "set fewer loader.num_workers or a smaller loader.batch_size; loader.workers=thread takes the least memory"),
    Fault("workers", r"killed by signal: Segmentation fault|SIGSEGV",
          "a library crashed in a worker process, on one picture most often",
          "task=check finds the picture; loader=simple shows where it crashes"),
    Fault("workers", r"killed by signal: Bus error|SIGBUS|insufficient shared memory",
          "a worker process touched memory that a full disk or /dev/shm could not give, or a file that became shorter",
          "make room in cache_dir or set loader.cache=none; in a container raise its --shm-size"),
    Fault("workers", r"received 0 items of ancdata|Too many open files|Errno 24\]",
          "the limit of open files is reached", "raise it (ulimit -n 65536), or set fewer loader.num_workers"),
    Fault("workers", r"unable to (?:write to|open|mmap) (?:file|shared memory object) </torch_|shm_open",
          "/dev/shm is full or too small", "raise a container's --shm-size, or set loader.workers=thread, which does not use it"),
    Fault("workers", r"DataLoader worker .*exited unexpectedly|BrokenPipeError",
          "a worker process is gone, and with it the pipe to it",
          "loader=simple loads in this process and shows the cause; task=check reads every picture"),
    Fault("workers", r"DataLoader timed out",
          "no batch came from the workers in time", "raise loader.timeout_s for slow storage; loader=simple shows what waits"),
    Fault("workers", r"PicklingError|[Cc]an't pickle|cannot pickle|Can't get local object",
          "something that a worker process must be sent cannot be sent",
          "set loader.multiprocessing_context=fork or loader.workers=thread"),
    Fault("workers", r"can't start new thread|Resource temporarily unavailable|Errno 11\]",
          "no further process or thread may be started", "raise the limit (ulimit -u), or set fewer loader.num_workers"),
    Fault("workers", r"Cannot re-initialize CUDA in forked subprocess",
          "a forked worker process touched the GPU, which CUDA forbids",
          "set loader.multiprocessing_context=spawn; weldtrain's own workers never touch it"),
    Fault("GPU", r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
          "the GPU's memory is full",
          "lower loader.batch_size (auto finds what fits; trainer.accumulate makes up for it) or model.min_size"),
    Fault("GPU", r"device-side assert",
          "a kernel met a value that it does not allow, such as a label beyond the classes",
          "run with device=cpu, or with CUDA_LAUNCH_BLOCKING=1, to see which; labels are 1 to the number of classes"),
    Fault("GPU", r"Torch not compiled with CUDA enabled",
          "this torch was built without CUDA", "install torch for CUDA (pytorch.org), or set device=cpu", ConfigError),
    Fault("GPU", r"driver on your system is too old|driver version is insufficient|CUDA_ERROR_INSUFFICIENT_DRIVER",
          "the GPU's driver is older than this torch needs", "update it, or install torch for an older CUDA", ConfigError),
    Fault("GPU", r"no kernel image is available|not compatible with the current PyTorch installation",
          "this torch has no code for this generation of GPU", "install a torch built for it, or set device=cpu", ConfigError),
    Fault("GPU", r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|invalid device ordinal",
          "no GPU is there for CUDA", "see nvidia-smi and CUDA_VISIBLE_DEVICES (in a container: --gpus all), or set device=cpu",
          ConfigError),
    Fault("GPU", r"CUDNN_STATUS|cuDNN (?:error|version incompatibility)",
          "cuDNN failed: another version of it on LD_LIBRARY_PATH, or the GPU's memory is full",
          "unset LD_LIBRARY_PATH; lower loader.batch_size"),
    Fault("GPU", r"CUDA error: (?:an illegal memory access|unspecified launch failure|the launch timed out|uncorrectable ECC)"
          r"|NVRM: Xid",
          "the GPU stopped in the midst of a kernel", "see nvidia-smi and dmesg; run again with CUDA_LAUNCH_BLOCKING=1"),
    Fault("ranks", r"Watchdog caught collective operation timeout|NCCL (?:error|timeout)|ProcessGroupNCCL",
          "ranks waited for one another in vain", "another rank's message tells why; NCCL_DEBUG=INFO tells more"),
    Fault("ranks", r"gloo.*(?:Connection reset by peer|Read error)|Connection closed by (?:remote )?peer",
          "another rank is gone", "its own message or run.rankN.log tells why; the same command with resume=auto goes on"),
    Fault("installation", r"operator torchvision::nms does not exist|torchvision::nms.*from the 'CUDA' backend"
          r"|Couldn't load custom C\+\+ ops|undefined symbol.*(?:torch|c10)",
          "torchvision was not built for this torch", "pip install --upgrade torch torchvision, both together", ConfigError),
    Fault("installation", r"numpy\.dtype size changed|compiled using NumPy 1\.x|numpy\.core\.multiarray failed to import",
          "a package was built for another NumPy", "pip install --upgrade numpy opencv-python-headless torch", ConfigError),
    Fault("installation", r"libGL\.so|libgthread|libSM\.so|libXext\.so",
          "OpenCV with windows is installed, and their libraries are not",
          "pip uninstall opencv-python; pip install --force-reinstall opencv-python-headless", ConfigError),
    Fault("installation", r"Rebuild the library with Windows, GTK|The function is not implemented.*(?:GTK|Cocoa)",
          "a window was asked of an OpenCV that has none", "weldtrain needs none: leave imshow and namedWindow out", ConfigError),
    Fault("installation", r"(?:ImportError|OSError): .*?[\w+.-]+\.so[\w.]*: (?:cannot open shared object file|.*GLIBC)",
          "a library of the system is missing or too old", "install it by the system's package manager, or in a container",
          ConfigError),
    Fault("installation", r"ModuleNotFoundError",
          "a package is missing", "pip install -e . (or weldtrain) brings all that is needed; extras are listed in the README",
          ConfigError),
    Fault("data", r"stack expects each tensor to be equal size",
          "pictures of several sizes were stacked by a loader that does not pad", "weldtrain's own loader pads each batch"),
    Fault("data", r"(?:[Aa]ll bounding boxes should have positive height and width|Expected target boxes to be a tensor)",
          "a picture's boxes are not what torchvision's detector takes: [N,4], none of them empty",
          "task=check names them; weldtrain's loader drops empty boxes and keeps [0,4] for a picture without any", DataError),
    Fault("data", r"KeyError.*(?:DataLoader worker|in __getitem__)|Caught KeyError",
          "a name that the data set was asked for is not in it", "task=check compares annotations with pictures", DataError),
    Fault("checkpoint", r"Weights only load failed|Unsupported global|UnpicklingError",
          "the file holds more than numbers, or is no checkpoint; what could run code is not loaded",
          "take a checkpoint that weldtrain wrote, or save a plain state_dict", DataError),
    Fault("checkpoint", r"PytorchStreamReader failed|failed finding central directory|invalid header or archive|not a ZIP"
          r"|EOFError: (?:Ran out of input|No data left)",
          "the checkpoint is damaged, by a copy that broke off most often",
          "copy it again, or take last.pt, best.pt or epoch_NNNN.pt beside it", DataError),
    Fault("checkpoint", r"Error\(s\) in loading state_dict|Missing key\(s\) in state_dict",
          "the weights are of another model, class list or release",
          "set model, and dataset.classes, as they were then, or model.weights=FILE, which takes what fits", ConfigError),
    Fault("checkpoint", r"invalid hash value|URLError|IncompleteRead|Max retries exceeded|Name or service not known",
          "a download failed or broke off", "try again, or fetch the file elsewhere and set model.weights=FILE"),
    Fault("disk", r"Errno 28\]|No space left on device|Errno 122\]|[Qq]uota exceeded|Errno 27\]|File too large"
          r"|file write failed|unexpected pos",
          "a disk is full, or a quota or a limit of file size is reached",
          "make room, or set output_dir and cache_dir to folders with room"),
    Fault("disk", r"Errno 30\]|Read-only file system",
          "a place may not be written", "set output_dir and cache_dir to folders with the right to write"),
    Fault("disk", r"Errno 13\]|PermissionError|Errno 1\]",
          "a file or folder may not be used by this user",
          "give the right to it, or set another; output_dir and cache_dir are written to"),
    Fault("disk", r"Errno 20\]|NotADirectoryError|Errno 36\]|File name too long",
          "a path cannot be: a file stands where a folder should, or a name is too long",
          "set output_dir and cache_dir to others"),
    Fault("disk", r"Errno 2\]|FileNotFoundError",
          "a file or folder is not there, or was taken away while the run went on",
          "give its path; a folder on the network may have been unmounted"),
    Fault("disk", r"Errno 116\]|Stale file handle|Errno 5\]|Input/output error|Errno 107\]|Transport endpoint",
          "the disk or the network folder behind a file failed", "see dmesg; copy the data to a local disk"),
    Fault("memory", r"MemoryError|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory|Errno 12\]"
          r"|Unable to allocate",
          "the machine's memory, or a limit on it (ulimit -v, a container's), is reached",
          "lower loader.batch_size, loader.num_workers or model.max_size, or set loader.cache=disk"),
    Fault("ports", r"TensorBoard could not bind|Errno 98\]|EADDRINUSE|[Aa]ddress already in use",
          "another program has the port", "TensorBoard: add --port 6007; torchrun: add --rdzv_endpoint=localhost:0"),
    Fault("configuration", r"Key '.*' is not in struct|Could not override|ConfigAttributeError|ConfigKeyError",
          "a key is not known", "see weldtrain --help; a key of your own preset goes into --config-dir", ConfigError),
    Fault("configuration", r"MissingMandatoryValue|Missing mandatory value",
          "a key without a default has no value", "give it on the command line: key=value", ConfigError),
    Fault("configuration", r"OverrideParseException|LexerNoViableAltException|Ambiguous value",
          "an override cannot be read", "quote a value with commas, braces or blanks: 'key=\"a,b\"'", ConfigError),
)


def diagnosed(text: str) -> Fault | None:
    """The first fault of the table that a message speaks of."""
    text = " ".join(text.split())
    return next((fault for fault in FAULTS if re.search(fault.says, text)), None)


def explained(error: BaseException) -> WeldtrainError | None:
    """The error that says what a raw one means and what to do, by its own text or that of its declared cause; None where the
    table does not know it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, WeldtrainError):  # whose own words are better
        fault = diagnosed(f"{type(cause).__name__}: {cause}")
        if fault is not None:
            said = [one_line(_said(e))[:300] for e in dict.fromkeys((error, cause))]
            return fault.kind(f"{fault.means} ({'; from '.join(said)})", getattr(cause, "filename", None) or "", fault.fix)
        cause = cause.__cause__ if not str(cause.__cause__).startswith(IN_WORKER) else None  # a traceback, of this very error
    return None


def _said(error: BaseException) -> str:
    """What the system says of a file, without its number and name; of another error all."""
    return error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
