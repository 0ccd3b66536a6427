"""What measures tersekv: evaluations, pictures, timings. Its dependencies are the extra `lab`."""
