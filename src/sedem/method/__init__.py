"""The paper, in its order: segments, encoder, compressor, selector, decompressor, injection."""
