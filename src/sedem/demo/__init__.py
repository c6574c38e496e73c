"""The documents and questions of `sedem demo`; SOURCES.md names the origin of the texts."""

from __future__ import annotations

from pathlib import Path

DOCUMENTS = Path(__file__).parent

QUESTIONS = (
    "Who founded the Eastman Kodak Company?",
    "In what year was Ulysses launched?",
    "What are cacao flowers pollinated by?",
    "Who wrote American Pie?",
    "What is the weight of shipment HK-2093?",
    "Who is the mayor of Belholm?",
    "When was Thea Karbach born?",
)
