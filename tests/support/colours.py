"""How far apart colours are: contrast, lightness, and distance for colour-blind readers."""

import numpy as np

# From normal linear RGB to what a dichromat sees. Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1.0.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# IEC 61966-2-1 (sRGB): from linear RGB to CIE XYZ, with white D65.
XYZ = np.array(
    [
        [0.412456, 0.357576, 0.180438],
        [0.212673, 0.715152, 0.072175],
        [0.019334, 0.119192, 0.950304],
    ]
)


def linear(colour: str) -> np.ndarray:
    """The linear RGB of "#rrggbb", "black" or "white", each from 0 to 1."""
    named = {"black": "#000000", "white": "#ffffff"}
    digits = named.get(colour, colour)
    srgb = np.array([int(digits[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(XYZ[1] @ linear(colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def distance(one: str, other: str, vision: str = "normal") -> float:
    """The distance of two colours in CIELAB (CIE 1976) for a reader with this vision."""
    first, second = (_lab(np.clip(VISION[vision] @ linear(c), 0, 1)) for c in (one, other))
    return float(np.linalg.norm(first - second))


def _lab(rgb: np.ndarray) -> np.ndarray:
    ratio = (XYZ @ rgb) / (XYZ @ np.ones(3))
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
