"""Where a bank is kept: the interface of a store and the one on local disk."""
