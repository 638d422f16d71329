"""A short English text to calibrate on: stories, facts, talk, lists, code and numbers, as models meet them.

Each part is read as a sequence of its own. A change here changes every scale found, and so every fingerprint.
"""

from __future__ import annotations

PARTS = (
    """\
The ferry left the harbour a little after six, when the lamps along the quay were still burning and the gulls had begun
to quarrel over whatever the fishing boats had thrown away. Marta stood at the rail with her collar turned up. She had
made this crossing every autumn for eleven years, first with her father, then alone, and she knew by the sound of the
engine when they had passed the breakwater and when the captain would ease off for the shoals. Behind her a boy was
asking his mother whether the island had any trees.

"A few," the mother said. "They all lean the same way."

"Why?"

"Because the wind has been telling them to for a hundred years, and they have stopped arguing."

Marta smiled into her scarf. It was true about the trees. It was true about the people too, though one learned not to
say so at the post office. By the time the sun had cleared the hills the island lay ahead of them, low and brown, with
its one white house and its one red roof, and she found that she was counting the windows as she had when she was small:
four below, three above, and the round one in the gable that had never been opened in anyone's memory.
""",
    """\
Water is most dense at about four degrees Celsius. Above that temperature it expands as it warms, like most liquids;
below it, it expands as it cools, because its molecules begin to arrange themselves in the open, six-sided pattern of
ice. This is why a lake freezes from the top. In autumn the surface loses heat, grows heavier and sinks, and warmer
water rises to take its place. Once the whole lake has reached four degrees the circulation stops: water that is colder
still is lighter, stays at the surface, and finally freezes there. The ice floats and shields what lies below, so that
fish can live through the winter in a lake whose surface would carry a truck.

The same property breaks rocks. Rain enters a crack, freezes, grows by roughly nine percent in volume and pushes the
sides apart. After many nights of frost the crack is deep enough to split the stone. Geologists call this frost
weathering; together with wind, running water and the roots of plants it turns mountains into soil over millions of
years. In 1903 an engineer measured the pressure of freezing water in a steel vessel and found more than 200 megapascals
before the vessel burst.
""",
    """\
def moving_average(values: list[float], width: int) -> list[float]:
    \"\"\"The mean of every `width` neighbouring values; the result is width - 1 shorter than the input.\"\"\"
    if width < 1:
        raise ValueError(f"width must be positive, not {width}")
    total = sum(values[:width])
    means = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        means.append(total / width)
    return means


class Account:
    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner = owner
        self.balance = balance  # in cents

    def withdraw(self, amount: int) -> None:
        if amount > self.balance:
            raise InsufficientFunds(f"{self.owner} has {self.balance}, which is less than {amount}")
        self.balance -= amount


if __name__ == "__main__":
    print(moving_average([1.0, 2.0, 4.0, 8.0, 16.0], 3))

$ python averages.py
[2.3333333333333335, 4.666666666666667, 9.333333333333334]
""",
    """\
<|im_start|>system
You are a helpful assistant. Answer briefly and say so when you do not know.<|im_end|>
<|im_start|>user
I have two eggs, some flour, half a litre of milk and no butter. What can I make for breakfast?<|im_end|>
<|im_start|>assistant
You can make pancakes. Here is how:

1. Whisk the two eggs with 300 ml of the milk and a pinch of salt.
2. Stir in about 150 g of flour until the batter is smooth. Let it rest for ten minutes.
3. Heat a pan with a little oil instead of butter. Pour in a thin layer of batter.
4. Turn the pancake when its edge begins to brown, usually after a minute or two.

Serve them with jam, sugar and lemon, or cheese. If you have no oil either, use a non-stick pan on low heat.<|im_end|>
<|im_start|>user
Thanks! How many will that make, and can I keep the batter until tomorrow?<|im_end|>
<|im_start|>assistant
It makes six to eight pancakes, depending on the size of your pan. The batter keeps for a day in the refrigerator if you
cover it. It thickens overnight, so stir in a spoonful of milk before you use it.<|im_end|>
""",
    """\
Minutes of the meeting of 14 March 2019

Present: A. Okafor (chair), L. Brandt, J. Silva, P. Nguyen, R. Haddad. Apologies: M. Lindqvist.

1. The minutes of the last meeting were approved without changes.
2. Budget. The treasurer reported an income of $48,250 and expenses of $41,975, which leaves a surplus of $6,275,
compared with $3,110 a year ago. Membership fees made up 62% of the income, the summer fair 23%, and donations the rest.
3. Roof of the hall. Three offers were received: $12,400, $13,950 and $17,200. The committee preferred the second, since
it includes a guarantee of ten years and the removal of the old tiles. Work could begin on 6 May and would take about
three weeks. J. Silva will ask the council whether a permit is required.
4. Library. It was noted that the number of loans fell from 5,204 to 4,871, although more children came to the reading
afternoons than ever. R. Haddad proposed longer hours on Saturdays; the proposal was accepted by four votes to one.
5. Any other business. The next meeting takes place on 11 April at 7:30 p.m. in the small hall.
""",
    """\
Question: A train travels 180 kilometres in 2.5 hours. How far does it travel in 4 hours at the same speed?
Answer: The speed is 180 / 2.5 = 72 kilometres per hour. In 4 hours the train travels 72 * 4 = 288 kilometres.

Question: Which is larger, 3/7 or 4/9?
Answer: Bring both to the denominator 63. 3/7 = 27/63 and 4/9 = 28/63. So 4/9 is larger.

Question: Solve x^2 - 5x + 6 = 0.
Answer: The numbers 2 and 3 have the sum 5 and the product 6, so x^2 - 5x + 6 = (x - 2)(x - 3). The solutions are x = 2
and x = 3.

Question: Who wrote the play in which a prince speaks to the skull of a jester?
Answer: William Shakespeare wrote it; the prince is Hamlet, and the jester was called Yorick.

Question: What is the difference between weather and climate?
Answer: Weather is what the air does at a place over hours and days. Climate is the pattern of weather over decades.

The function opens the file for reading and returns its lines. If the file does not exist, an error is raised unless a
default was given. The optional argument encoding names the character set; if it is not specified, the platform's
default is used. Note that the returned object keeps the file open until it is closed or collected, so it should be used
in a with statement. Changed in version 3.2: paths may also be objects that have a __fspath__() method.
""",
    """\
Dear Ms. Keller,

thank you for your letter of the 3rd. I am sorry to hear that the second parcel has not arrived either. We have asked
the carrier to look for it, and their answer should reach us by Friday at the latest; if it is lost we will of course
send you a new one at our own cost, or return what you have paid, whichever you prefer. To spare you another journey to
the station, please tell us a time when somebody is at home, and whether a neighbour may sign for you.

As for your other question: the lamp can be used outdoors, but it should not stand in the rain for long. The cable is
two metres long and the bulb is included. A longer cable costs nine euros more.

With kind regards,
Tomas Reyes

The city grew around the river because the river was the only road. Timber came down it in spring, grain in summer, and
in winter, when it froze, the merchants drove their sledges over it to the fairs in the south. The first bridge was
built in 1347 and swept away by ice four years later; the second stood for three centuries, carried houses, shops and a
chapel, and burned in a single night. When the railway came the river lost its trade within ten years, and the
warehouses stood empty until painters, who needed light and could not pay for it, began to move in.
""",
)
