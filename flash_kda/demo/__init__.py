"""`flash-kda demo`: a small model of real text, trained and checked on this machine. See ``flash_kda.demo.run``."""
