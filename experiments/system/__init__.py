"""The machinery that every study shares: cells, scales, training, tables, pictures, pages."""
