import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # state_steps.py, shared by the tests of this folder
