"""DAC (Dynamic Alignment Compressor): times of stages, measured, watched, and made into aligned ranks."""
