"""Denoising diffusion of images, and masked diffusion of text."""

__version__ = "0.1.0"
