"""Reading: documents into blocks of memory."""
