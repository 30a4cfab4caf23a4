"""The doctor: whether this machine, and a pairing of target and draft, can work, and what to mend."""

from vllm_specx.doctor.finding import Finding, errors
from vllm_specx.doctor.pairing import check

__all__ = ["Finding", "check", "errors"]
