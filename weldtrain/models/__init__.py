"""Faster R-CNN, built from torchvision's parts."""
