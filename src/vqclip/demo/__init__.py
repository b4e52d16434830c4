"""``vqclip demo``: a page in the browser that shows what a tokenizer makes of an image and of a caption.

answers.py     a visitor's input → ids, bits, probabilities, nearest items; no state, no Gradio
fragments.py   these → HTML, everything escaped
page.py        the layout, in Gradio
server.py      serves it: which requests are answered, where uploads are, how it ends
"""
