"""What tests of several rooms use: networks, grids, Triton's interpreter."""
