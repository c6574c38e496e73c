"""Where a bank is kept: the interface of a store, and the store on local disk."""
