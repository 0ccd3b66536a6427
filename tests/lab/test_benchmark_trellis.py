"""The ablations of `trellis`: the mode of their calls and records."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from conftest import benchmark
from made_records import record, write

METRICS = {"kl": 0.1, "kl_p99": 0.2, "top1_agreement": 0.9, "nll": 2.0}


def test_ablations_name_the_mode_that_their_records_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call sets the mode and records are searched for it, independent of the tasks' default."""
    ablation, calls = benchmark("trellis"), []
    monkeypatch.setattr(ablation, "program", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(ablation, "load_config", lambda _: None)
    monkeypatch.setattr(ablation, "needs_corpus", lambda *_: False)
    row = ablation.Row("kivi", "kivi:bits=2", ablation.Setting(sinks=0))
    args = argparse.Namespace(out=tmp_path, model="tiny", windows=1, context=64, test="text", workers=1)
    ablation.run_tables(args, [row])
    assert calls[0][calls[0].index("--mode") + 1] == "simulate"
    for mode, found in (("cache", False), ("simulate", True)):
        options = {"text": "text", "context": 64, "windows": 1, "mode": mode}
        records = [record("divergence", options, "0-a", recipe, METRICS) for recipe in ("full", "kivi:bits=2")]
        folder = ablation.records_folder(tmp_path, row.setting)
        folder.parent.mkdir(exist_ok=True)
        write(folder, records)
        assert (ablation.summary(row, args) is not None) is found
