"""Speed and accuracy on real shapes: cases, timing, peers, exact answers and reports. Needs no GPU to be imported."""
