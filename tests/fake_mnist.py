"""Tiny files in MNIST's own layout, so that no test needs a download."""

import struct

import numpy as np


def write_idx(path, array):
    """One file of MNIST's layout: magic number (uint8, dimensions), sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def fake_images(folder, num_train=120, num_test=30):
    """Images whose first pixel is the row number and whose label is row mod 10."""
    for part, num in (("train", num_train), ("t10k", num_test)):
        images = np.zeros((num, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(num)
        images[:, 9:19, 9:19] = 255
        write_idx(folder / "raw" / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / "raw" / f"{part}-labels-idx1-ubyte", np.arange(num) % 10)
