"""Mixture-of-experts models through transformers' own modules, one decoder layer in memory at a time.

names.py: which architectures, their sizes, and where a routed expert lies on disk.
config.py: config.json to transformers. weights.py: tensors into modules.
layer.py, model.py: the forward that `calibrate.family` describes.
"""
