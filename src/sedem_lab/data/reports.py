"""GovReport (Huang et al., 2021): reports of agencies, each to be summarized from all of its text.

No part of a report is the evidence, so it measures what reads everything: `k` "all", by `rouge_l`.
"""

from __future__ import annotations

from sedem.types import Document
from sedem_lab.data.examples import NO_CONTEXT, Example, ExampleSet
from sedem_lab.data.records import RecordModel, Records, Text, with_id, within

QUESTION = "Summarize the report."


class _Report(RecordModel):
    id: str | None = None
    report: Text
    summary: Text


def read(records: Records) -> ExampleSet:
    """GovReport, with one report per record; a record without an id has its number."""
    result = ExampleSet("govreport", [])
    for number, (place, record) in enumerate(records):
        place = with_id(place, record)
        found = _Report.from_record(record, place)
        identity = found.id or str(number)
        if not found.report.strip():
            result.drop(NO_CONTEXT, identity)
        elif result.wants(identity, QUESTION, [found.summary]):
            with within(place):
                document = Document(f"report {identity}", found.report)
            result.examples.append(Example(identity, (document,), QUESTION, (found.summary,), ()))
    return result
