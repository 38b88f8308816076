"""How the embedded models were made: teachers, curriculum, supervised training and evaluation."""
