"""task=evaluate: thresholds that one split chose are judged on another, kept, and told in a report that needs no network."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch

from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.engine import checkpoint
from weldtrain.engine.evaluator import Judged
from weldtrain.errors import ConfigError, DataError
from weldtrain.formats import written
from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match
from weldtrain.tasks import evaluate, predict
from weldtrain.telemetry import judgement
from weldtrain.telemetry.record import RunRecord


@pytest.fixture
def judged(configured, guessing, tmp_path):
    """`judged("evaluate.split=train")`: the record of an evaluation."""
    def run(*overrides, place="run", model=None):
        cfg = configured("task=evaluate", f"checkpoint={model or guessing()}", "evaluate.bootstrap=50", *overrides)
        with RunRecord(tmp_path / place, asdict(cfg)) as record:
            evaluate.run(cfg, record)
        return record

    return run


@pytest.fixture
def perfect(monkeypatch):
    """The detector finds exactly what is there, each with a score of 0.9, and nothing else."""
    def as_it_is(model, loader, classes, cfg, device, dtype):
        dataset: DetectionDataset = loader.dataset
        index = dataset.index
        rows = np.concatenate([np.arange(index.box_rows(row).start, index.box_rows(row).stop) for row in dataset.rows])
        image = np.repeat(np.arange(len(dataset)), np.diff(index.box_offsets)[dataset.rows])
        truth = Boxes(image, index.boxes[rows], dataset.labels_of(rows))
        found = Boxes(image, index.boxes[rows], dataset.labels_of(rows), np.full(len(rows), 0.9))
        met = match(found, truth)
        metrics = evaluate_detections(truth, found, met, pictures=len(dataset), classes=classes)
        return Judged(metrics, truth, found, met, len(dataset), index.identities(dataset.rows))

    monkeypatch.setattr(evaluate, "evaluate", as_it_is)


def test_perfect_predictions_are_perfect_in_every_figure(judged, perfect):
    record = judged("evaluate.split=train")
    assert record.summary["map"] == 1.0
    told = json.loads((record.dir / "summary.json").read_text())["inspection"]
    assert (told["all"]["missed"], told["all"]["false_calls_per_picture"], told["chosen_on"]) == (0, 0.0, "val")
    assert told["classes"] and all(c["missed"] == 0 and c["a90"] is None and c["no_pod"] for c in told["classes"].values())
    assert told["intervals"]["map"] is None and all(r["ap_50"] == 1.0 for r in told["by_size"])
    matrix = np.array(told["confusion"])
    assert (matrix == np.diag(np.diag(matrix))).all() and matrix.sum() == told["all"]["defects"] > 0
    assert told["calibration_error"] == pytest.approx(0.1)


def test_thresholds_are_chosen_on_one_split_kept_and_verified_on_another(judged, guessing, tmp_path):
    model = guessing()
    first = judged("evaluate.split=train", "evaluate.operating_point=f1", model=model)
    told = first.summary["inspection"]
    assert told["chosen_on"] == "val" and told["rule"]["by"] == "f1"
    kept = checkpoint.load(first.checkpoints / evaluate.JUDGED)
    assert {name: p["threshold"] for name, p in kept["metrics"]["operating_points"]["points"].items()}.items() >= {
        name: c["threshold"] for name, c in told["classes"].items()}.items()
    model = first.checkpoints / evaluate.JUDGED
    again = judged("evaluate.split=train", "evaluate.operating_point=f1", model=model, place="again")
    assert again.summary["inspection"] == told and again.summary["map"] == first.summary["map"]
    assert not (again.checkpoints / evaluate.JUDGED).exists()  # nothing new
    other = judged("evaluate.operating_point=cost", model=model, place="other")
    assert other.summary["inspection"]["rule"]["by"] == "cost" and (other.checkpoints / evaluate.JUDGED).exists()
    assert "another one has to verify them" in (other.dir / "report.html").read_text()


def trained_on(configured, cache, split):
    index = open_index(configured().dataset, cache)
    return torch.from_numpy(index.identities(index.rows(split)))


def test_pictures_that_were_trained_on_verify_nothing(judged, guessing, configured, cache, tmp_path):
    model = guessing(trained_on=trained_on(configured, cache, "train"))
    told = judged("evaluate.split=train", model=model).summary["inspection"]
    assert told["trained_on"] == told["shown"] > 0
    assert "pictures with defects were trained on: what is found in them tells nothing" in (tmp_path / "run/run.log").read_text()
    html = (tmp_path / "run/report.html").read_text()
    assert "were trained on: these figures tell nothing of new pictures" in html and "holds here" not in html
    assert judged(model=model, place="val").summary["inspection"]["trained_on"] == 0
    old = judged("evaluate.split=train", model=guessing(), place="old").summary["inspection"]
    assert old["trained_on"] is None  # of an earlier release: not known
    kept = old["classes"]["crack"] | {"why": "", "defects": 200, "missed": 0}
    assert judgement.promises(old | {"classes": {"crack": kept}}, 0.995)["crack"][1] == (
        "not contradicted here, and too few defects to verify it: 0 of 200 missed")
    assert judgement.promises(old | {"classes": {"crack": kept}}, 0.95)["crack"][1] == (
        "holds here as well: with 95% confidence no more than 2% are missed, unless these were trained on, which is not known")


def test_a_few_pictures_of_those_that_chose_are_told_by_their_number(judged, guessing):
    told = judged("evaluate.split=train", "evaluate.choose_on=val", model=guessing()).summary["inspection"]
    crack = told["classes"]["crack"] | {"why": "", "defects": 9, "missed": 0}
    said = judgement.promises(told | {"chose": 1, "classes": {"crack": crack}}, 0.95)
    assert "had a part in the promise" in said["crack"][1]
    assert judgement.in_sample(told | {"chose": 1}) == (
        f", in which 1 of the {told['shown']} pictures with defects had a part: others have to verify them")
    assert judgement.in_sample(told) == ""


def test_pictures_that_chose_the_thresholds_are_known_in_any_folder_and_split(judged, guessing, configured, tmp_path):
    import shutil
    first = judged(model=guessing())
    shutil.copytree(configured().dataset.root, tmp_path / "moved")
    table = tmp_path / "moved/train_val_test_split.csv"
    table.write_text(table.read_text().replace(",val", ",test"))
    told = judged(f"dataset.root={tmp_path / 'moved'}", "evaluate.split=test", model=first.checkpoints / evaluate.JUDGED,
                  place="moved").summary["inspection"]
    assert told["chosen_on"] == "val" and told["chose"] == told["shown"] > 0
    assert not judged("evaluate.split=train", model=first.checkpoints / evaluate.JUDGED, place="train").summary[
        "inspection"]["chose"]


@pytest.mark.parametrize("override", ["evaluate.tiles=64", "evaluate.max_detections=5", "evaluate.score_thresh=0.2"])
def test_thresholds_hold_for_pictures_that_are_looked_at_as_those_were_that_chose_them(judged, guessing, override, tmp_path):
    model = judged("evaluate.split=train", model=guessing()).checkpoints / evaluate.JUDGED
    same = judged("evaluate.split=train", model=model, place="same")
    assert not (same.checkpoints / evaluate.JUDGED).exists()
    other = judged("evaluate.split=train", override, model=model, place="other")
    assert (other.checkpoints / evaluate.JUDGED).exists()
    assert "the checkpoint's thresholds were chosen with" in (tmp_path / "other/run.log").read_text()


def test_a_checkpoint_of_the_first_release_is_judged_and_kept(judged, guessing):
    file = guessing()
    state = checkpoint.load(file)
    del state["batch"], state["trained_px"]
    torch.save({**state, "format": 1}, file)
    first = judged("evaluate.split=train", model=file)
    kept = first.checkpoints / evaluate.JUDGED
    again = judged("evaluate.split=train", model=kept, place="again")
    assert again.summary["best_epoch"] == first.summary["best_epoch"] == 1
    assert again.summary["inspection"] == first.summary["inspection"]


def test_the_report_holds_all_it_shows(judged):
    html = (judged("evaluate.split=train", "dataset.split.group=null").dir / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", html) and "<script" not in html
    assert "<svg" in html and "data:image/jpeg" in html and "claim compliance with no code" in html
    for part in ("By class", "Which sizes are found", "Precision and recall", "What is taken for what", "Where it is weak",
                 "Are its scores probabilities?", "The worst misses", "What was judged", "SHA-256"):
        assert part in html, part
    assert "Undefined" not in html and "None" not in html and not re.search(r"\bnan\b", html)


@pytest.fixture
def sheet(configured, cache, tmp_path, monkeypatch):
    """Writes a CSV of pictures beside the welds, or rather a copy of them; returns the overrides."""
    import shutil

    def make(text, **columns):
        cfg = configured()
        root = tmp_path / "copy"
        if not root.exists():
            shutil.copytree(cfg.dataset.root, root)
        index = open_index(cfg.dataset, cache)
        lines = [text.format(image=index.path(row).rpartition("/")[2], n=row) for row in range(len(index))]
        (root / "films.csv").write_text("\n".join([",".join(["image", *columns]), *lines, ""]))
        return [f"dataset.root={root}", "dataset.picture_csv=films.csv"]

    return make


def test_sizes_in_millimetres_are_those_in_pixels_times_their_size(judged, guessing, sheet):
    model = guessing()
    pixels = judged(model=model).summary["inspection"]["by_size"]
    for k, overrides in enumerate((["dataset.mm_per_pixel=0.5"], [*sheet("{image},0.5", MM=1), "dataset.mm_per_pixel=mm"])):
        told = judged(*overrides, model=model, place=f"mm{k}").summary["inspection"]
        assert told["unit"] == "mm" and [(2 * r["low"], 2 * r["high"], r["missed"], r["ap_50"])
                                         for r in told["by_size"]] == [
            (r["low"], r["high"], r["missed"], r["ap_50"]) for r in pixels]


def test_slices_by_the_users_columns(judged, sheet):
    told = judged(*sheet("{image},film {n},x", film=1, welder=1), "evaluate.slice_by=[Film,welder]").summary["inspection"]
    films, welders = told["by_column"]["Film"], told["by_column"]["welder"]
    assert len(films) == 4 and welders["x"]["pictures"] == 4
    assert sum(f["defects"] for f in films.values()) == welders["x"]["defects"] == told["all"]["defects"]


@pytest.mark.parametrize(("line", "ask", "error", "said"), [
    ("{image},0", "dataset.mm_per_pixel=mm", DataError, "'0' for .* is no number of millimetres"),
    ("{image},wide", "dataset.mm_per_pixel=mm", DataError, "'wide' for"),
    ("{image},1", "dataset.mm_per_pixel=mmm", ConfigError, "did you mean 'mm'"),
    ("lost{n}.jpg,1", "dataset.mm_per_pixel=mm", DataError, "has no line for .* and 3 other pictures"),
    ("{image},1\n{image},2", "dataset.mm_per_pixel=mm", DataError, "has mm 2 here and 1 on line 2"),
    ("{image},1", "evaluate.slice_by=[welder]", ConfigError, r"evaluate\.slice_by"),
    ("{image},1", "dataset.mm_per_pixel=-1", ConfigError, "out of range")])
def test_what_a_sheet_lacks_is_said(judged, sheet, line, ask, error, said):
    with pytest.raises(error, match=said):
        judged(*sheet(line, mm=1), ask)


def test_without_a_sheet_a_column_is_asked_for_by_its_key(judged, configured, welds):
    with pytest.raises(ConfigError, match=r"dataset.mm_per_pixel: .*train_val_test_split.csv has no column 'film'"):
        judged("dataset.mm_per_pixel=film")


@pytest.mark.parametrize("clean", [True, False], ids=["no defect at all", "one class absent"])
def test_what_cannot_be_said_is_not_made_up(judged, configured, tmp_path, clean):
    """Row 56: a split without defects, or without one class."""
    import shutil
    root = tmp_path / "copy"
    shutil.copytree(configured().dataset.root, root)
    for file in (root / "annotations").iterdir():
        file.write_text(re.sub(r"<object>.*?</object>", lambda m: "" if clean or "<name>slag" in m[0] else m[0],
                               file.read_text(), flags=re.DOTALL))
    record = judged(f"dataset.root={root}")
    told = json.loads((record.dir / "summary.json").read_text())
    assert (told["map"] is None) == clean and told["per_class_ap"]["slag"] is None
    slag = told["inspection"]["classes"]["slag"]
    assert (slag["defects"], slag["missed_share"], slag["a90"]) == (0, None, None) and slag["false_calls"] >= 0
    assert told["inspection"]["clean_pictures"]["false_calls_per_picture"] is not None or not clean
    html = (record.dir / "report.html").read_text()
    assert ("shows no defect" in html) == clean and not re.search(r">-1<|\bnan\b|None", html)


def test_several_splits_are_judged_together_and_told_apart(judged):
    told = judged("evaluate.split=train+val").summary
    by = told["inspection"]["by_column"]["split"]
    assert told["pictures"] == 12 and {name: row["pictures"] for name, row in by.items()} == {"train": 8, "val": 4}
    assert sum(row["defects"] for row in by.values()) == told["inspection"]["all"]["defects"]


def test_where_the_split_to_choose_on_is_not_there_the_judged_one_chooses_and_that_is_said(judged, tmp_path):
    told = judged("evaluate.split=train", "evaluate.choose_on=other").summary["inspection"]
    assert told["chose"] == told["shown"] > 0 and told["chosen_on"] == "train"
    assert "no picture in split 'other': train itself chooses" in (tmp_path / "run/run.log").read_text()


@pytest.fixture
def predicted(guessing, configured, tmp_path):
    """`predicted(0.01)`: the predictions.json of a detector on all welds, and its checkpoint."""
    def make(threshold):
        model = guessing()
        cfg = configured("task=predict", f"checkpoint={model}", f"predict.source={configured().dataset.root}",
                         f"predict.threshold={threshold}", "predict.save=[json]")
        with RunRecord(tmp_path / f"predicted{threshold}", asdict(cfg)) as record:
            predict.run(cfg, record)
        return record.dir / written.RESULTS, model

    return make


def test_a_file_of_predictions_is_judged_as_the_detector_that_made_it(judged, predicted, tmp_path):
    """Row 60: also that AP of what was cut is too low, which is said."""
    file, model = predicted(0.01)
    own = judged("evaluate.split=train", model=model)
    told = judged("evaluate.split=train", "checkpoint=null", f"evaluate.predictions={file}", place="file")
    assert told.summary["map"] == pytest.approx(own.summary["map"], abs=1e-3)
    for name, figures in own.summary["inspection"]["classes"].items():
        other = told.summary["inspection"]["classes"][name]
        assert (other["missed"], other["defects"]) == (figures["missed"], figures["defects"])
        assert other["threshold"] == pytest.approx(figures["threshold"], abs=1e-5)
    assert "was cut at" not in (tmp_path / "file/run.log").read_text() and not list(told.checkpoints.iterdir())
    assert "predictions.json on 8 pictures" not in (told.dir / "report.html").read_text()
    assert told.summary["best_epoch"] is None
    file, _ = predicted(0.5)
    cut = judged("evaluate.split=train", "checkpoint=null", f"evaluate.predictions={file}", place="cut")
    assert cut.summary["map"] <= told.summary["map"]
    assert "was cut at a score of 0.5: AP is too low" in (tmp_path / "cut/run.log").read_text()


def test_results_of_any_detector_are_judged_also_beyond_the_picture_and_beyond_a_hundred(judged, predicted):
    file, _ = predicted(0.01)
    results, about = json.loads(file.read_text()), json.loads(file.with_name(written.PICTURES).read_text())
    about["info"] = {"thresholds": "0.5"}  # whatever that is
    results += [{"image_id": about["images"][0]["id"], "category_id": 1, "bbox": box, "score": 1.0}
                for box in ([-50, -50, 40, 40], [500, 20, 10, 10], [-9, -9, 900, 900], [128, 128, 0, 0]) for _ in range(60)]
    file.write_text(json.dumps(results))
    file.with_name(written.PICTURES).write_text(json.dumps(about))
    told = judged("evaluate.split=train+val", "evaluate.choose_on=train+val", "checkpoint=null", f"evaluate.predictions={file}")
    assert (told.dir / "report.html").exists() and told.summary["inspection"]["all"]["false_calls"] >= 240
    assert "holds no picture" not in (told.dir / "run.log").read_text()


@pytest.mark.parametrize(("change", "said"), [
    (lambda results, about: results.clear() or about["images"].pop(), "holds nothing of"),
    (lambda results, about: results[0].update(category_id=99), "result 1 has category_id 99, which images"),
    (lambda results, about: results[1].update(image_id="x"), "result 2 has image_id x, which images"),
    (lambda results, about: about["images"][0].update(width=512), r"as 512x128 px, and the picture is 128x128"),
    (lambda results, about: results[0].update(score=7), "holds 7 as its score"),
    (lambda results, about: results[0].update(bbox=[1, 2]), "result 1 is none"),
    (lambda results, about: results[0].update(bbox=[1, 2, -3, 4]), r"a box \[1, 2, -3, 4\] that is none"),
    (lambda results, about: about.pop("categories"), "is no COCO description"),
    (lambda results, about: about["categories"].pop(), "result|class")])
def test_a_file_of_something_else_is_refused(judged, predicted, change, said):
    file, _ = predicted(0.01)
    results, about = json.loads(file.read_text()), json.loads(file.with_name(written.PICTURES).read_text())
    change(results, about)
    file.write_text(json.dumps(results))
    file.with_name(written.PICTURES).write_text(json.dumps(about))
    with pytest.raises(DataError, match=said):
        judged("evaluate.split=train+val", "checkpoint=null", f"evaluate.predictions={file}", place="file")
    file.with_name(written.PICTURES).unlink()
    with pytest.raises(DataError, match=r"images\.json.*cannot be read"):
        judged("checkpoint=null", f"evaluate.predictions={file}", place="other")
