"""Coming from verl and TRL: their options and ours side by side, and the conversion of their scripts to recipes.

`verl.txt` and `trl.txt` list the options. `table` reads them: error messages and the pages docs/from-*.md use them.
`shell` reads a verl script, `conversions` has the conversions that need more than a name, `recipe` writes the recipe.
"""
