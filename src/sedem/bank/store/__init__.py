"""Storage of banks: the store interface, local folders and object stores."""
