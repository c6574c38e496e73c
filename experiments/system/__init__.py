"""Code that all studies share: cells, scales, training, tables, pictures, pages."""
