"""Where a run's figures go beside metrics.jsonl: TensorBoard, MLflow, Weights & Biases. Each is imported where it is used."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weldtrain.errors import ConfigError, one_line, origins
from weldtrain.telemetry import board

if TYPE_CHECKING:  # imported at every start, also where only help is wanted
    import numpy as np

log = logging.getLogger(__name__)

_PROJECT = "weldtrain"
_PATIENCE_S = 30.0  # with a server, at the run's end


class _Writer:
    """What the record tells each writer; what it is not made to show it leaves out."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def picture(self, step: int, tag: str, image: np.ndarray) -> None: ...

    def curves(self, step: int, tag: str, curves: Mapping[str, Mapping[str, np.ndarray]]) -> None: ...

    def describe(self, name: str, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None: ...

    def result(self, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class TensorBoard(_Writer):
    def __init__(self, run_dir: Path, purge_step: int | None) -> None:
        """Of steps from `purge_step` on what an earlier process wrote is to be forgotten."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run_dir / "tensorboard", flush_secs=10, purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def picture(self, step: int, tag: str, image: np.ndarray) -> None:
        self._writer.file_writer.add_summary(board.picture(tag, image), step)

    def curves(self, step: int, tag: str, curves: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        for name, c in curves.items():
            # Of detections nobody counts true negatives.
            self._writer.add_pr_curve_raw(f"{tag}/{name}", c["tp"], c["fp"], 0 * c["tp"], c["fn"], c["precision"], c["recall"],
                                          step, num_thresholds=len(c["tp"]))

    def describe(self, name: str, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None:
        self._writer.add_custom_scalars(board.BOARDS)
        self._writer.add_text("run", board.card(facts))

    def result(self, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        for summary in board.hparams(settings, metrics):
            self._writer.file_writer.add_summary(summary)

    def close(self, status: str) -> None:
        self._writer.close()


class MLflow(_Writer):
    """A run of the experiment weldtrain at MLFLOW_TRACKING_URI. Figures are sent in the background."""

    def __init__(self, run_dir: Path, purge_step: int | None) -> None:
        # Else it takes minutes to say that no server is there, and to end.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._background = concurrent.futures.ThreadPoolExecutor(1, "weldtrain-mlflow")
        self._sent: list[concurrent.futures.Future] = []
        try:
            self._client = MlflowClient()
            experiment = self._client.get_experiment_by_name(_PROJECT)
            where = experiment.experiment_id if experiment else self._client.create_experiment(_PROJECT)
            self._run = _remembered(run_dir / "mlflow.id", lambda: self._client.create_run(where).info.run_id)
            self._known = self._client.get_run(self._run).data.params
        except MlflowException as e:
            raise _no_tracking("MLflow", "MLFLOW_TRACKING_URI", e) from e

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(_mlflow_name(tag), value, now, step) for tag, value in values.items()]
        self._send(metrics=metrics)

    def describe(self, name: str, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None:
        def items(values: Mapping[str, object]) -> dict[str, str]:
            return {_mlflow_name(key): str(value)[:500] for key, value in values.items()}

        params = [self._param(key, value) for key, value in items(settings).items() if key not in self._known]  # none can change
        tags = [self._tag(key, value) for key, value in {"mlflow.runName": name, **items(facts)}.items()]
        self._send(params=params, tags=tags)

    def close(self, status: str) -> None:
        known = {"done": "FINISHED", "pruned": "FINISHED", "interrupted": "KILLED"}
        self._sent.append(self._background.submit(self._client.set_terminated, self._run, known.get(status, "FAILED")))
        done, late = concurrent.futures.wait(self._sent, _PATIENCE_S)
        self._background.shutdown(wait=False, cancel_futures=True)
        errors = [error for future in done if (error := future.exception())]
        if errors or late:
            log.warning("MLflow lacks %d of %d messages, of which metrics.jsonl has the figures%s", len(errors) + len(late),
                        len(self._sent), f": {one_line(str(errors[-1]))[:300]}" if errors else "")

    def _send(self, **what: Any) -> None:
        self._sent.append(self._background.submit(self._client.log_batch, self._run, **what))


class WandB(_Writer):
    """A run of the project $WANDB_PROJECT, by default weldtrain. WANDB_MODE=offline keeps it in the run's directory."""

    def __init__(self, run_dir: Path, purge_step: int | None) -> None:
        import wandb

        self._image = wandb.Image
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT), dir=run_dir, resume="allow",
                id=_remembered(run_dir / "wandb.id", lambda: secrets.token_hex(4)),
                settings=wandb.Settings(console="off", silent=True))
        except wandb.Error as e:
            raise _no_tracking("Weights & Biases", "WANDB_API_KEY and WANDB_MODE", e) from e
        self._run.define_metric("*", step_metric="step")  # its own count knows no way back, which a resumed run goes

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def picture(self, step: int, tag: str, image: np.ndarray) -> None:
        self._run.log({"step": step, tag: self._image(image, file_type="jpg")})

    def describe(self, name: str, facts: Mapping[str, object], settings: Mapping[str, Any]) -> None:
        self._run.name = name
        self._run.config.update({**settings, **{name: str(value) for name, value in facts.items()}}, allow_val_change=True)

    def result(self, settings: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._run.summary.update(metrics)  # of the best epoch, not of the last

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("done", "pruned") else 1)


WRITERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def _remembered(file: Path, make: Callable[[], str]) -> str:
    """What the file holds, so that a resumed run is the same one elsewhere too; new where it is not there."""
    if not file.exists():
        file.write_text(make(), "utf-8")
    return file.read_text("utf-8")


def _no_tracking(whose: str, where: str, error: Exception) -> ConfigError:
    said = next((origin.strerror for origin in origins(error) if isinstance(origin, OSError) and origin.strerror), str(error))
    return ConfigError(f"{whose} says: {one_line(said)[:300]}", "trainer.log", f"see {where}, or leave it out of the list")


def _mlflow_name(key: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", key)
