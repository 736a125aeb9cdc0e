"""Measurements as ratios within one run; never part of a timed test."""
