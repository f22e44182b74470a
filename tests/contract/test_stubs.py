"""The committed Python stubs are what the proto file gives, and the contract keeps its own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from branchline.engine.errors import ErrorCode
from branchline.engine.service import wire
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.servicer import STATUSES

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gen_proto.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_code_of_the_contract_is_mapped_both_ways() -> None:
    numbers = {value.number for value in pb.ErrorCode.DESCRIPTOR.values} - {pb.ERROR_CODE_UNSPECIFIED}
    assert set(STATUSES) == numbers
    assert {wire._CODES[code] for code in ErrorCode} == numbers


def test_every_sampling_scalar_tells_absent_from_zero() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, f"{field.name} must be optional"
