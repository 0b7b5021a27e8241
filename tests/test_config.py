"""Every config composes; every wrong key, choice or value is one line that names the way out."""

import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from weldtrain import config, overrides
from weldtrain.__main__ import _report
from weldtrain.errors import ConfigError
from weldtrain.validation import validated

CHOICES = [(p.parent.name, p.stem) for p in sorted(config.CONF_DIR.glob("*/*.yaml"))]


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.CONF_DIR), version_base="1.3"):
        return validated(compose("config", list(overrides)), "/shell")


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_in_conf_composes(group, choice):
    own = [] if (group, choice) == ("dataset", "synthetic") else ["dataset=welding_v2", "dataset.root=/data"]
    composed(f"{group}={choice}", "checkpoint=x.pt", "runs=x", "run=x", "predict.source=x", *own)


@pytest.mark.parametrize("experiment", ["quickstart", "welding_v2", "debug"])
@pytest.mark.parametrize("dataset", ["synthetic", "welding_v2"])
def test_experiments_compose_with_every_data_set(experiment, dataset):
    root = [] if dataset == "synthetic" else ["dataset.root=/data"]
    assert composed(f"experiment={experiment}", f"dataset={dataset}", *root).dataset.format == dataset


def test_the_articles_setting():
    cfg = composed("experiment=welding_v2", "dataset.root=/data")
    loader = cfg.loader
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.timeout_s) == (16, 4, 2, 60)
    assert loader.persistent_workers and loader.pin_memory and loader.drop_last and loader.shuffle
    assert (cfg.trainer.epochs, cfg.model.backbone, cfg.model.pyramid_channels) == (100, "resnet50", 256)


@pytest.mark.parametrize(("override", "text"), [
    ("trainer.epochs=0", r"trainer\.epochs: 0 is out of range; it must be at least 1"),
    ("optimizer.lr=0", r"optimizer\.lr"),
    ("optimizer.lr=nan", r"optimizer\.lr: nan"),
    ("loader.num_workers=-1", r"loader\.num_workers"),
    ("loader.num_workers=many", r"loader\.num_workers: 'many' is not one of auto or a number"),
    ("loader.pin_memory=perhaps", r"loader\.pin_memory"),
    ("trainer.precision=bf61", r"did you mean 'bf16'"),
    ("model.anchor_sizes=[]", r"model\.anchor_sizes: the list is empty"),
    ("model.anchor_sizes=[8,-1,8,8,8]", r"model\.anchor_sizes: -1"),
    ("model.max_size=100", r"model\.max_size"),
    ("dataset.root=/x", r"dataset\.root"),
    ("task=evaluate", r"checkpoint: not set"),
    ("dataset.classes=[a,a]", r"dataset\.classes"),
    ("optimizer.lr=inf", r"optimizer\.lr: inf .* finite"),
    ("trainer.grad_clip=inf", r"trainer\.grad_clip: inf"),
    ("seed=99999999999999999999", r"seed: 99999999999999999999"),
    ("dataset.classes=[]", r"dataset\.classes: names no class"),
    ("dataset.classes=[crack,' ']", r"dataset\.classes: names no class"),
    ("model.window_levels=[4095,0]", r"model\.window_levels: \[4095\.0, 0\.0\] is no window"),
    ("model.window_levels=[0,70000]", r"model\.window_levels: 70000"),
    ("model.window_percentiles=[50]", r"model\.window_percentiles: \[50\.0\] is no window"),
    ("dataset.split.val=0.9", r"dataset\.split: val and test leave nothing to train on"),
    ("dataset.split.group='weld_('", r"dataset\.split\.group: is no regular expression"),
    ("dataset.max_megapixels=0", r"dataset\.max_megapixels: 0"),
    ("dataset.bad_images=skp", r"dataset\.bad_images: .*did you mean 'skip'"),
    ("dataset.difficult=ignored", r"dataset\.difficult: .*did you mean 'ignore'"),
])
def test_values_out_of_range_are_refused_before_any_data_is_read(override, text):
    with pytest.raises(ConfigError, match=text):
        composed(override)


@pytest.mark.parametrize(("override", "near"), [
    ("trainer.lerning_rate=1", "optimizer.lr"), ("+trainer.lrr=1", "optimizer.lr"), ("++workers=1", "loader.num_workers"),
    ("~trainer.epoch", "trainer.epochs"), ("loader.batchsize=2", "loader.batch_size"), ("dataset.rot=/x", "dataset.root"),
    ("modle=x", "model")])
def test_a_mistyped_key_names_the_nearest(override, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        overrides.check_override_keys([override])


def test_right_keys_pass():
    overrides.check_override_keys(["trainer.epochs=1", "model=x", "hydra.run.dir=/tmp/x", "hydra/launcher=basic",
                                "+trainer.epochs=2", "optimizer.lr=0.1,0.2", "dataset.classes=[a,b]"])


def test_paths_are_the_shells(monkeypatch):
    monkeypatch.setenv("DATA", "/mnt/data")
    monkeypatch.setenv("HOME", "/home/me")
    typed = ["dataset=welding_v2", "dataset.root=$DATA/welds", "output_dir=../out", "cache_dir=~/c", "checkpoint=a/b.pt"]
    cfg = composed(*map(overrides.quoted_text, typed))
    assert (cfg.dataset.root, cfg.output_dir, cfg.cache_dir, cfg.checkpoint) == (
        "/mnt/data/welds", "/out", "/home/me/c", "/shell/a/b.pt")


@pytest.mark.parametrize("path", ["/mnt/my welds (2)/a", "/mnt/it's", "/mnt/[x]{y}", "/mnt/焊缝", "/mnt/a=b", "/mnt/100%"])
def test_any_path_can_be_typed(path):
    assert composed("dataset=welding_v2", overrides.quoted_text(f"dataset.root={path}")).dataset.root == path
    assert overrides.quoted_text(f"trainer.epochs={path}") == f"trainer.epochs={path}"


@pytest.mark.parametrize("typed", ["checkpoint=a/b.pt", "dataset.root=/my welds", "trainer.epochs=2", "dataset.root=/mnt/it's"])
def test_the_command_that_is_told_gives_the_same_arguments(typed):
    arguments = [overrides.quoted_text(typed), "-m", "optimizer.lr=1,2"]
    told = overrides.command_line(arguments)
    assert [overrides.quoted_text(a) for a in shlex.split(told)] == ["python", "-m", "weldtrain", *arguments]
    assert "'" in typed or shlex.split(told)[3] == typed


def weldtrain(*args, cwd):
    return subprocess.run([sys.executable, "-m", "weldtrain", *args], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("args", "words"), [
    (["trainer.lerning_rate=1"], ["trainer.lerning_rate", "optimizer.lr"]),
    (["model=fasterrcnn_resnet5O"], ["did you mean 'fasterrcnn_resnet50_fpn'", "fasterrcnn_mobilenet_v3"]),
    (["optimizer.lr=abc"], ["optimizer.lr", "abc"]),
    (["-m", "optimizer.lrr=1,2"], ["optimizer.lr"]),
])
def test_one_line_and_exit_2(tmp_path, args, words):
    done = weldtrain(*args, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and all(w in done.stderr for w in words), done.stderr
    assert not list(tmp_path.iterdir())


def test_help_and_the_composed_config_need_nothing(tmp_path):
    for args in (["--help"], ["--cfg", "job"]):
        done = weldtrain(*args, cwd=tmp_path)
        assert done.returncode == 0 and "batch_size" in done.stdout


def test_a_users_own_folder_adds_presets(tmp_path):
    (tmp_path / "my/experiment").mkdir(parents=True)
    (tmp_path / "my/experiment/mine.yaml").write_text("# @package _global_\ntrainer:\n  epochs: 7\n")
    done = weldtrain("--config-dir", "my", "experiment=mine", "--cfg", "job", "-p", "trainer", cwd=tmp_path)
    assert "epochs: 7" in done.stdout, done.stderr
    (tmp_path / "my/experiment/mine.yaml").write_text("# @package _global_\ntrainer:\n  epoch: 7\n")
    done = weldtrain("--config-dir", "my", "experiment=mine", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 2 and "epoch" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize("override", ["optimizer.lr=true", "trainer.epochs=1.5", "loader.num_workers=1.5", "output_dir=null",
                                      "dataset.classes=crack", "model.anchor_sizes=12", "++loader={foo:1}"])
def test_a_value_of_the_wrong_kind_does_not_compose(override):
    with pytest.raises(ConfigCompositionException):
        composed(override)


@pytest.mark.parametrize(("override", "said"), [
    ("loader.num_workers=1.5", "loader.num_workers: '1.5' does not fit; it takes a whole number or auto"),
    ("loader.num_workers=null", "loader.num_workers: 'null' does not fit; it takes a whole number or auto"),
    ("loader.num_workers=100000", "loader.num_workers: 100000 is out of range; it must be at least 0 and at most 512"),
    ("trainer.epochs=abc", "trainer.epochs: 'abc' does not fit; it takes a whole number"),
    ("loader.shuffle=maybe", "loader.shuffle: 'maybe' does not fit; it takes true or false"),
    ("dataset.classes=x", "dataset.classes: 'x' does not fit; it takes a list such as [a,b] or null"),
    ("model.window_percentiles=3", "model.window_percentiles: '3' does not fit; it takes a list such as [0.1,2]"),
    ("trainer=3", "trainer: 3 is no choice; name one, or leave out trainer=")])
def test_a_value_of_the_wrong_kind_is_told_what_its_key_takes(capsys, override, said):
    with pytest.raises((ConfigError, ConfigCompositionException)) as caught:
        overrides.check_override_keys([override])
        composed(override)
    assert _report(caught.value) == 2 and capsys.readouterr().err == f"weldtrain: {said}\n"


@pytest.mark.parametrize("group", config.GROUPS)
def test_a_group_set_to_null_is_refused_by_name(group):
    with pytest.raises(ConfigError, match=f"^{group}: null"):
        overrides.check_override_keys([f"{group}=null"])


def test_every_default_is_within_its_own_limits():
    for experiment in ("quickstart", "debug"):
        cfg = composed(f"experiment={experiment}")
        # Plain dataclasses: nothing downstream can meet a missing or untyped key.
        assert isinstance(cfg, config.Config) and isinstance(cfg.trainer, config.TrainerConfig)


@pytest.mark.parametrize(("given", "meant"), [
    ("dataset.root=2024_05_12", "2024_05_12"), ("dataset.root=1e5", "1e5"), ("dataset.root=true", "true"),
    ("dataset.images=a=b (1)", "a=b (1)"), ("dataset.split_csv=x [2].csv", "x [2].csv"),
    ("dataset.root=D:\\me\\it's", "D:\\me\\it's"), ("dataset.root=a\\", "a\\"),
    ("dataset.split.group=weld_[0-9]+", "weld_[0-9]+"), ("dataset.annotations='as quoted'", "as quoted")])
def test_text_reaches_its_key_as_it_was_typed(given, meant):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([overrides.quoted_text(given)])
    assert override.value() == meant or str(override.value()) == meant


def test_nothing_is_written_below_the_data(configured, tmp_path):
    with pytest.raises(ConfigError, match=r"output_dir: .*lies below dataset\.root"):
        configured("dataset=auto", f"dataset.root={tmp_path}", f"output_dir={tmp_path / 'outputs'}")
    with pytest.raises(ConfigError, match=r"dataset\.root: is empty"):
        configured("dataset=auto", "dataset.root=''")
