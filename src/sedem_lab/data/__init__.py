"""Public sets, own files, evidence labels, stage-1 text, cloze questions and exact facts."""
