"""Coming from verl and TRL: their options and ours side by side, and the conversion of their scripts to recipes.

`verl.txt` and `trl.txt` list the options; `table` reads them for error messages, `pages` for the documentation.
`sources` reads the files that `dapo convert` gets (`shell` and `words` launch scripts, `python` Python files), `verl`
and `trl` convert values, and `recipe` writes the recipe.
"""
